//! Lockstep keeps read-only companions of ConfigMaps and Secrets in step with their sources.
//!
//! Flow of a change: [`watch`] → [`world::state`] → [`mirror::queue`] → [`plan`] → [`mirror::write`].
//! Flow of a review: [`tls`] → [`guard::http`] → [`guard::review`]. Both share `policy`, `content`, `keys` and read the
//! [`world`]; neither calls the other.
//!
//! | room | what is in it |
//! | --- | --- |
//! | [`cli`], [`config`] | the command line, and settings that are valid |
//! | [`keys`], [`policy`], [`content`], [`marks`] | the vocabulary, what a source asks for, what is copied, what is written on a companion; pure |
//! | [`object`] | ConfigMaps, Secrets and Namespaces as they come over the wire |
//! | [`client`] | the one place where a client is built |
//! | [`substitute`] | words of a text replaced by values |
//! | [`world`] | what the watches have seen; `state` is pure |
//! | [`certs`] | the guard's certificates: what is issued and when (pure), the CA Secret, the CA bundles, files |
//! | [`mirror`] | queue, plan, ledger and brake (pure), and the passes that carry a plan out |
//! | [`tls`], [`guard`] | the listener, and the webhook behind it: `review` and `stamp` are pure |
//! | [`leader`] | which replica writes: a pure decision, the Lease, the claim |
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
