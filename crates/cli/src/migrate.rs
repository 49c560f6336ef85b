//! Takes sources and copies over from another tool that copies ConfigMaps and Secrets, in place, and gives them back.
//!
//! | file | job |
//! | --- | --- |
//! | [`tool`], [`replicator`], [`reflector`] | what the annotations of each tool say; pure |
//! | [`expression`] | regular expressions as patterns; pure |
//! | [`migration_plan`], [`not_movable`] | what would move, and why something is left to the person; pure |
//! | [`undo_file`] | what is changed, for the way back |
//! | [`requests`] | the API calls |
//! | [`migration`] | the steps, there and back |

mod expression;
pub(crate) mod migration;
pub(crate) mod migration_plan;
pub(crate) mod not_movable;
mod reflector;
mod replicator;
pub(crate) mod requests;
pub(crate) mod tool;
pub(crate) mod undo_file;

use lockstep_core::object::{Kind, ObjectKey};

/// An object as people write it: `namespace/name`, with `secret/` in front for Secrets.
pub fn label(key: &ObjectKey) -> String {
    match key.kind {
        Kind::ConfigMap => key.to_string(),
        Kind::Secret => format!("secret/{key}"),
    }
}
