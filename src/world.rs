//! What the watches have seen: sources, digests of companions, namespaces.

pub mod state;
pub mod watch;
