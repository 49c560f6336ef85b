//! One object, watched by its name.

use std::sync::Arc;

use kube::Client;
use tokio::sync::watch as channel;

use crate::watch::{self, Event, WatchSpec, Watched};

/// What the watch says of it.
pub(super) enum Sight<T> {
    /// It has not been listed yet.
    Unknown,
    Absent,
    There(Arc<T>),
}

impl<T> Clone for Sight<T> {
    fn clone(&self) -> Self {
        match self {
            Self::Unknown => Self::Unknown,
            Self::Absent => Self::Absent,
            Self::There(object) => Self::There(object.clone()),
        }
    }
}

impl<T> Sight<T> {
    pub(super) fn get(&self) -> Option<&Arc<T>> {
        match self {
            Self::There(object) => Some(object),
            _ => None,
        }
    }
}

/// Watches the one object of this name in a collection, for ever.
pub(super) async fn look_out<T: Watched>(
    client: Client,
    what: String,
    collection: String,
    name: &str,
    sight: channel::Sender<Sight<T>>,
) {
    let subject = WatchSpec {
        name: what,
        path: collection,
        label_selector: None,
        // RBAC by resourceName grants a list or a watch with this selector, and no other.
        field_selector: Some(format!("metadata.name={name}")),
    };
    // While a list comes in, only its end tells whether the object is there.
    let mut listing = None;
    watch::run(client, subject, |event: Event<T>| {
        let seen = match event {
            Event::Init => {
                listing = Some(Sight::Absent);
                return;
            }
            Event::InitDone(_) => listing.take(),
            Event::Apply(object) => Some(Sight::There(Arc::new(object))),
            Event::Delete(_) => Some(Sight::Absent),
            Event::Bookmark => None,
        };
        match (&mut listing, seen) {
            (Some(listed), Some(seen)) => *listed = seen,
            (None, Some(seen)) => drop(sight.send_replace(seen)),
            (_, None) => {}
        }
    })
    .await;
}
