//! What Lockstep decides: what should exist, what is missing, who may do what. No I/O and no clock: `now` and the world
//! are arguments. Only jitter, new keys and the subjects of certificates are random.
//!
//! | module | what it decides or holds |
//! | --- | --- |
//! | [`keys`], [`object`], [`text`] | our labels and annotations; objects as they are sent; texts of bounded length |
//! | [`policy`] | what a source asks for, what is copied, and how a companion is marked |
//! | [`world`] | what the watches have shown |
//! | [`plan`] | what is missing for a source |
//! | [`writes`] | the requests of a write and what their answers mean; the order of writes, retries, the brake on deletes |
//! | [`admission`] | the answer to a review: who may change a source or a companion, and what a source needs |
//! | [`lease`] | who leads, and what the Lease says besides |
//! | [`certs`] | which CA and leaf there should be, and when they are replaced |
//! | [`failure`] | why a request failed, and when it is tried again |
#![forbid(unsafe_code)]

pub mod admission;
pub mod certs;
pub mod failure;
pub mod keys;
pub mod lease;
pub mod object;
pub mod plan;
pub mod policy;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod text;
pub mod world;
pub mod writes;
