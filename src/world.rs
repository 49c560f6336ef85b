//! What the watches have seen: sources, digests of companions, namespaces.

pub mod feed;
pub mod state;

use std::sync::{Arc, PoisonError, RwLock};

use crate::{keys::Keys, object::Kind};
use state::{Limits, Stream, World};

/// What one instance looks at.
#[derive(Debug, Clone)]
pub struct Scope {
    pub keys: Arc<Keys>,
    pub limits: Limits,
    pub kinds: Vec<Kind>,
}

impl Scope {
    /// The watches that feed the world.
    #[must_use]
    pub fn streams(&self) -> Vec<Stream> {
        let of_kind = |kind: &Kind| [Stream::Companions(*kind), Stream::Sources(*kind)];
        std::iter::once(Stream::Namespaces).chain(self.kinds.iter().flat_map(of_kind)).collect()
    }
}

/// The world, shared by watches, workers, writes and reviews.
#[derive(Clone)]
pub struct SharedWorld(Arc<RwLock<World>>);

impl From<World> for SharedWorld {
    fn from(world: World) -> Self {
        Self(Arc::new(RwLock::new(world)))
    }
}

impl SharedWorld {
    #[must_use]
    pub fn new(scope: &Scope) -> Self {
        World::new(scope.keys.clone(), scope.limits.clone()).into()
    }

    pub fn read<T>(&self, f: impl FnOnce(&World) -> T) -> T {
        f(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn write<T>(&self, f: impl FnOnce(&mut World) -> T) -> T {
        f(&mut self.0.write().unwrap_or_else(PoisonError::into_inner))
    }
}
