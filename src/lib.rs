//! Lockstep keeps read-only companions of ConfigMaps and Secrets in step with their sources.
//!
//! Flow of a change: [`world::watch`] → [`world::state`] → [`mirror::queue`] → [`mirror::plan`] → [`mirror::write`].
//!
//! | room | what is in it |
//! | --- | --- |
//! | [`cli`], [`config`] | the command line, and settings that are valid |
//! | [`keys`], [`policy`], [`content`], [`marks`] | the vocabulary, what a source asks for, what is copied, what is written on a companion; pure |
//! | [`object`] | ConfigMaps, Secrets and Namespaces as they come over the wire |
//! | [`client`] | the one place where a client is built |
//! | [`world`] | what the watches have seen; `state` is pure |
//! | [`mirror`] | queue, plan, ledger and brake (pure), and the passes that carry a plan out |
//! | [`ops`] | metrics, health, logs |
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
#[cfg(test)]
pub mod testing;
pub mod world;
