//! Leader election by a Lease: only the leader writes, for as long as its [`Claim`] is held.

mod annotations;
pub(crate) mod candidate;
mod claim;

pub use annotations::LeaseAnnotations;
pub(crate) use candidate::{Election, ElectionConfig, identity, start};
pub(crate) use claim::Claim;

#[cfg(test)]
mod tests;
