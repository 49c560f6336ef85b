//! Lockstep keeps read-only companions of ConfigMaps and Secrets in step with their sources.
//!
//! The other crates: [`lockstep_core`] decides, [`lockstep_cluster`] talks to the API server, [`lockstep_cli`] has
//! the commands for people. `docs/architecture.md` has the whole picture.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`cli`], [`config`], [`manifests`] | the command line, the flags of `lockstep run`, what is installed |
//! | [`run`] | starts the parts, and stops them in order |
//! | [`controller`] | makes companions what their sources ask for |
//! | [`webhook`], [`tls`] | answers admission reviews, over HTTPS |
//! | [`certs`] | keeps the webhook's certificates |
//! | [`leader`] | the Lease that says which replica writes |
//! | [`ops`], [`clock`] | metrics, health, logs; the clocks, which tests can drive |
#![forbid(unsafe_code)]

pub mod certs;
pub mod cli;
mod clock;
mod config;
mod controller;
pub mod leader;
pub mod manifests;
pub mod ops;
mod run;
#[cfg(test)]
pub mod testing;
pub mod tls;
pub mod webhook;
