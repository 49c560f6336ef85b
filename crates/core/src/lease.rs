//! The Lease: who leads, which settings the leader publishes in it, and which deletes it holds.

pub mod decide;
pub mod hold;
pub mod record;
pub mod settings;
pub mod state;
