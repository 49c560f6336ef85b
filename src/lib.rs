//! Lockstep keeps read-only companions of ConfigMaps and Secrets in step with their sources.
//!
//! Flow of a change: [`watch`] → [`world::state`] → [`mirror::queue`] → [`plan`] → [`mirror::write`].
//! Flow of a review: [`tls`] → [`guard::http`] → [`guard::review`]. Both share `policy`, `content`, `keys` and read the
//! [`world`]; neither calls the other.
//!
//! | module | what it is for |
//! | --- | --- |
//! | [`cli`], [`config`] | the command line; flags and their validation |
//! | [`keys`], [`policy`], [`content`], [`marks`] | label and annotation keys, the policy of a source, the content that is copied, the marks of a companion; pure |
//! | [`object`] | ConfigMaps, Secrets and Namespaces as the API server sends them |
//! | [`client`] | builds the client, and turns its errors into failures that quote no content |
//! | [`substitute`] | replaces words in the manifests |
//! | [`world`] | what the watches have seen; `state` is pure |
//! | [`certs`] | the guard's certificates: what is issued and when (pure), the CA Secret, the CA bundles, files |
//! | [`mirror`] | queue, plan, ledger and brake (pure), and the passes that carry a plan out |
//! | [`tls`], [`guard`] | the listener, and the webhook behind it: `review` and `stamp` are pure |
//! | [`leader`] | leader election by a Lease; the decision is pure |
//! | [`ops`] | metrics, health, logs |
#![forbid(unsafe_code)]

pub mod backoff;
pub mod certs;
pub mod cli;
pub mod client;
pub mod config;
pub mod content;
pub mod guard;
pub mod keys;
pub mod leader;
pub mod marks;
pub mod mirror;
pub mod names;
pub mod object;
pub mod ops;
pub mod patch;
pub mod plan;
pub mod policy;
pub mod substitute;
#[cfg(test)]
pub mod testing;
pub mod text;
pub mod tls;
pub mod watch;
pub mod world;
