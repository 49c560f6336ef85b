//! The client of the API server, watches, informers, and the requests for the Lease.
//!
//! | module | job |
//! | --- | --- |
//! | [`client`] | a client of the API server, and what its errors mean |
//! | [`watch`] | a watch that never ends |
//! | [`informer`] | feeds the world from the watches |
//! | [`lease_client`] | reads and writes the Lease |
#![forbid(unsafe_code)]

pub mod client;
pub mod informer;
pub mod lease_client;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod watch;
