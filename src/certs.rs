//! The guard's certificates: one CA in a Secret that all replicas share, a leaf per replica, and the CA in the webhook
//! configurations. Or a pair from files.
//!
//! One task observes the Secret and the webhook configurations (`task`), a pure function decides (`decide`: `rotation`
//! for the Secret, `leaf` for the leaf, `webhooks` for the caBundle, `writes` for when to write), and the task carries
//! that out.

pub mod decide;
pub mod files;
pub mod issue;
pub mod leaf;
pub mod lifetimes;
pub mod resolver;
pub mod rotation;
pub mod secret;
pub mod task;
#[cfg(test)]
pub(crate) mod testing;
pub mod webhooks;
pub mod writes;
