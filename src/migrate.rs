//! Takes sources and copies over from another tool that copies ConfigMaps and Secrets, in place, and gives them back.
//!
//! | file | job |
//! | --- | --- |
//! | [`tool`], [`replicator`], [`reflector`] | what the annotations of each tool say; pure |
//! | [`regex`] | regular expressions as patterns; pure |
//! | [`plan`], [`reason`] | what would move, and why something is left to a person; pure |
//! | [`record`] | the undo file |
//! | [`cluster`] | the API calls |
//! | [`carry_out`] | the steps, there and back |

pub mod carry_out;
pub mod cluster;
pub mod plan;
pub mod reason;
pub mod record;
pub mod reflector;
pub mod regex;
pub mod replicator;
pub mod tool;

use crate::object::{Kind, ObjectKey};

/// An object as people write it: `namespace/name`, with `secret/` in front for Secrets.
#[must_use]
pub fn label(key: &ObjectKey) -> String {
    match key.kind {
        Kind::ConfigMap => key.to_string(),
        Kind::Secret => format!("secret/{key}"),
    }
}
