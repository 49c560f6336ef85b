//! What people's commands see of a cluster, with the rights of the person who runs them.
//!
//! | file | job |
//! | --- | --- |
//! | [`instance`] | the running replicas: Lease, settings, webhook configurations, pods |
//! | [`snapshot`] | reads sources, companions and namespaces once, into the same world that replicas plan with |
//! | [`status`] | a source and each of its companions: what is right, what is not, and why; pure |
//! | [`explain`] | why a namespace has or lacks a companion, step by step; pure |

pub mod explain;
pub mod instance;
pub mod snapshot;
pub mod status;
