//! Lockstep keeps read-only companions of ConfigMaps and Secrets in step with their sources.
//!
//! Flow of a change: `world::watch` → `world::state` → `mirror::queue` → `mirror::plan` → `mirror::write`.
#![forbid(unsafe_code)]

pub mod cli;
pub mod client;
pub mod config;
pub mod content;
pub mod keys;
pub mod marks;
pub mod mirror;
pub mod object;
pub mod ops;
pub mod policy;
pub mod world;
