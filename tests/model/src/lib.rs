//! Random histories of a cluster, and an independent model that says what Lockstep must make of them.
//!
//! The model is written from `docs/reference.md`, not from Lockstep's code, and shares nothing with it. Two drivers use
//! it: the simulation (`src/testing/simulation`), in which Lockstep's own code works on a simulated API server, and
//! the histories (`tests/histories`), which run on a real control plane with real faults.
//!
//! | file | job |
//! | --- | --- |
//! | [`object`] | ConfigMaps, Secrets and Namespaces as the model sees them, to and from JSON |
//! | [`names`] | the namespaces, names, labels and users that histories are made of |
//! | [`history`] | what people do: a list of steps that can be printed, parsed, replayed |
//! | [`mod@generate`] | random histories from a seed |
//! | [`mod@shrink`] | makes a failing history shorter |
//! | [`rules`] | what `docs/reference.md` says: targets, consent, content, marks |
//! | [`judge`] | sees every change of the cluster, and says what is wrong with it |

#![forbid(unsafe_code)]

pub mod generate;
pub mod history;
pub mod judge;
pub mod names;
pub mod object;
pub mod rules;
pub mod shrink;

pub use generate::generate;
pub use history::{Actor, Edit, History, Op, Step, Write};
pub use judge::{Change, Judge, Violation, Writer};
pub use names::Names;
pub use object::{Key, Kind, Object, Owner, Snapshot};
pub use shrink::shrink;
