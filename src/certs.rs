//! The webhook's certificates: `task` observes the Secret and the webhook configurations, and carries out what
//! [`lockstep_core::certs`] decides. Or a pair from files.

pub mod files;
pub mod resolver;
pub mod task;
