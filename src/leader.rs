//! Leader election by a Lease: only the leader writes, for as long as its [`Claim`] is held.

mod annotations;
pub(crate) mod candidate;
mod claim;
pub mod decide;
mod lease_client;
pub mod published;
pub mod record;
pub mod state;

pub use annotations::LeaseAnnotations;
pub use candidate::{Election, ElectionConfig, identity, start};
pub use claim::Claim;
pub use lease_client::LeaseClient;
pub use record::LeaseRecord;

#[cfg(test)]
mod tests;
