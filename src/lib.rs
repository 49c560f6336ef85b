//! Lockstep keeps read-only companions of ConfigMaps and Secrets in step with their sources.
//!
//! A change: [`watch`] → [`world`] → [`mirror::queue`] → [`mirror::reconcile`] → [`plan`] → [`mirror::apply`] →
//! [`mirror::report`]. A review: [`tls`] → [`guard::http`] → [`guard::review`] → answer. Both use [`policy`], [`plan`] and
//! the [`world`]; neither calls the other. `docs/architecture.md` has the whole picture.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`cli`], [`config`] | the command line, and validated settings |
//! | [`keys`], [`names`], [`object`] | our labels and annotations, the name rules of Kubernetes, objects as they are sent |
//! | [`policy`], [`content`], [`marks`] | what a source asks for, what is copied, what is written on a companion; pure |
//! | [`clock`] | the clocks, which tests can drive |
//! | [`backoff`], [`patch`], [`text`] | small helpers, each the only one of its kind; pure |
//! | [`client`], [`watch`] | the Kubernetes client, and a watch that never ends |
//! | [`world`] | what the watches have shown |
//! | [`plan`] | what is missing for a source; pure |
//! | [`mirror`] | the controller |
//! | [`guard`], [`tls`] | the admission webhook, and its listener |
//! | [`certs`] | the guard's certificates |
//! | [`leader`] | the Lease that says which replica writes |
//! | [`hold`] | annotations of the Lease about deletes that are held; pure |
//! | [`ops`] | metrics, health, logs |
//! | [`inspect`] | what people's commands see of a cluster, with their own rights |
//! | [`migrate`] | takes copies over from another tool, for `lockstep migrate` |
//! | [`ui`] | the page of `lockstep ui` |
#![forbid(unsafe_code)]

pub mod backoff;
pub mod certs;
pub mod cli;
pub mod client;
pub mod clock;
pub mod config;
pub mod content;
pub mod failure;
pub mod guard;
pub mod hold;
pub mod inspect;
pub mod keys;
pub mod leader;
pub mod marks;
pub mod migrate;
pub mod mirror;
pub mod names;
pub mod object;
pub mod ops;
pub mod patch;
pub mod plan;
pub mod policy;
#[cfg(test)]
pub mod testing;
pub mod text;
pub mod tls;
mod ui;
pub mod watch;
pub mod world;
