//! The Lease: who leads, which settings the leader publishes in it, and which deletes it holds.

pub mod election;
pub mod hold;
pub mod lease_state;
pub mod record;
pub mod settings;
