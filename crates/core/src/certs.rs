//! The webhook's certificates: one CA in a Secret that all replicas share, a leaf per replica, and the CA in the
//! webhook configurations. [`decide`] decides: [`rotation`] for the Secret, [`leaf`] for the leaf, [`webhooks`] for the
//! caBundle, [`write_history`] for when to write.

pub mod decide;
pub mod issue;
pub mod leaf;
pub mod lifetimes;
pub mod rotation;
pub mod secret;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod webhooks;
mod write_history;
