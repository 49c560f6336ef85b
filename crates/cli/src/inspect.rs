//! What people's commands see of a cluster, with the rights of the person who runs them.
//!
//! | file | job |
//! | --- | --- |
//! | [`instance`] | the running replicas: Lease, settings, webhook configurations, pods |
//! | [`snapshot`] | reads sources, companions and namespaces once, into the same world that replicas plan with |
//! | [`pages`] | lists, page by page |
//! | [`proposal`] | what would happen if an object were applied |
//! | [`refusal`] | tries writes, and says which webhook has refused one |
//! | [`rights`] | which rights somebody lacks |
//! | [`source_name`] | how people name a source |
//! | [`status`] | a source and each of its companions: what is right, what is not, and why; pure |
//! | [`audit`] | what is not as sources ask for; pure |
//! | [`check`] | whether Lockstep can be installed, or works once it is |
//! | [`explain`] | why a namespace has or lacks a companion, step by step; pure |

pub(crate) mod audit;
pub mod check;
pub(crate) mod explain;
pub mod instance;
pub(crate) mod pages;
pub(crate) mod proposal;
pub(crate) mod refusal;
pub(crate) mod rights;
pub(crate) mod snapshot;
pub(crate) mod source_name;
pub(crate) mod status;
