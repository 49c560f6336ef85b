//! Items for queues of writes.

use std::sync::Arc;

use super::configmap;
use crate::{object::ObjectKey, writes::fair_queue::QueuedRequest};

/// An item with a name or a number.
#[derive(Debug)]
pub struct Named<T> {
    source: ObjectKey,
    namespace: Arc<str>,
    permits: usize,
    pub name: T,
}

impl<T> QueuedRequest for Named<T> {
    fn source(&self) -> &ObjectKey {
        &self.source
    }

    fn namespace(&self) -> &Arc<str> {
        &self.namespace
    }

    fn permits(&self) -> usize {
        self.permits
    }
}

pub fn item<T>(source: &str, namespace: &str, permits: usize, name: T) -> Named<T> {
    Named { source: configmap("home", source), namespace: namespace.into(), permits, name }
}
