//! What a watch shows of an object.

use std::sync::Arc;

use serde::de::DeserializeOwned;

use super::{Meta, Object};

/// An object that can be watched.
pub trait Watched: Clone + DeserializeOwned + Send + 'static {
    fn meta(&self) -> &Meta;
}

impl Watched for Object {
    fn meta(&self) -> &Meta {
        &self.metadata
    }
}

/// What the watch of one object has shown.
#[derive(Debug, Clone, Default)]
pub enum Observed<T> {
    /// The first list is not complete.
    #[default]
    Unknown,
    Absent,
    Present(Arc<T>),
}

impl<T> Observed<T> {
    pub const fn present(&self) -> Option<&Arc<T>> {
        match self {
            Self::Present(object) => Some(object),
            _ => None,
        }
    }

    pub const fn is_unknown(&self) -> bool {
        matches!(self, Self::Unknown)
    }
}
