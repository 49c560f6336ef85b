//! What the watches have shown: sources, digests of companions, namespaces.
//!
//! | file | job |
//! | --- | --- |
//! | [`state`] | the state that watches and our own writes have shown; pure, like all below |
//! | [`source`], [`companion`], [`namespaces`] | what is kept of each object, and how it is read |
//! | [`payloads`] | what is written to companions, within a budget |
//! | `companions` | all companions, by name and by source |
//! | `wanted` | sources by the companion they want |
//! | `lost` | companions that vanished without our doing |
//! | [`packed`] | small forms of UIDs and versions; one copy of what many companions share |
//! | `relist` | distinguishes new states from old ones, across lists and our own writes |

pub mod companion;
mod companions;
mod lost;
pub mod namespaces;
mod packed;
mod payloads;
mod relist;
pub mod source;
pub mod state;
mod wanted;

pub(crate) use companion::uid_digest;
pub use companion::{Companion, CompanionState, ObservedCompanion};
pub use lost::LostCompanion;
pub use namespaces::{Eligibility, Namespace};
pub use packed::{Uid, Version};
pub use payloads::Payload;
pub use source::{Desired, ObservedSource, Source};
pub use state::{Effect, SourceEvent, World};

use std::sync::{Arc, PoisonError, RwLock};

use crate::{
    keys::Keys,
    object::{Kind, ObjectKey},
    policy::pattern::Patterns,
};

/// What one instance watches.
#[derive(Debug, Clone)]
pub struct Scope {
    pub keys: Arc<Keys>,
    pub rules: NamespaceRules,
    pub kinds: Vec<Kind>,
}

/// The hard limits that the controller keeps, whatever annotations say.
#[derive(Debug, Clone)]
pub struct NamespaceRules {
    /// Lockstep's own namespace. It has neither sources nor companions.
    pub own_namespace: String,
    /// Namespaces that are targets only if their `accept-from` allows it, in addition to `kube-*`.
    pub excluded: Patterns,
}

/// One of the watches that feed the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WatchId {
    Namespaces,
    Companions(Kind),
    Sources(Kind),
}

/// The world, shared by watches, workers, writes and reviews.
#[derive(Clone)]
pub struct SharedWorld(Arc<RwLock<World>>);

impl Scope {
    /// The watches that feed the world.
    pub fn watches(&self) -> Vec<WatchId> {
        let of_kind = |kind: &Kind| [WatchId::Companions(*kind), WatchId::Sources(*kind)];
        std::iter::once(WatchId::Namespaces).chain(self.kinds.iter().flat_map(of_kind)).collect()
    }
}

impl WatchId {
    /// Its name in logs, metrics and `/readyz`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Namespaces => "namespaces",
            Self::Companions(Kind::ConfigMap) => "companion configmaps",
            Self::Companions(Kind::Secret) => "companion secrets",
            Self::Sources(Kind::ConfigMap) => "source configmaps",
            Self::Sources(Kind::Secret) => "source secrets",
        }
    }
}

impl From<World> for SharedWorld {
    fn from(world: World) -> Self {
        Self(Arc::new(RwLock::new(world)))
    }
}

impl SharedWorld {
    pub fn new(scope: &Scope, source_cache: usize) -> Self {
        World::new(scope.keys.clone(), scope.rules.clone(), source_cache).into()
    }

    /// Every source that exists or has companions, in order: what a resync plans.
    pub fn all_sources(&self) -> Vec<ObjectKey> {
        let mut sources = self.read(World::all_sources);
        // Without the lock, because there may be many.
        sources.sort_unstable();
        sources
    }

    pub fn read<T>(&self, f: impl FnOnce(&World) -> T) -> T {
        f(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn write<T>(&self, f: impl FnOnce(&mut World) -> T) -> T {
        f(&mut self.0.write().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests;
