//! The watch of a single object by its name.

use std::sync::Arc;

use kube::Client;
use tokio::{sync::watch as channel, task::JoinSet};

use super::{Event, Restores, WatchSpec, run};
use lockstep_core::object::watched::{Observed, Watched};

/// Watches the object of this name in a collection, in a task that never ends, and sends every state of it.
pub fn watch_object<T: Watched + Sync>(
    tasks: &mut JoinSet<()>,
    client: &Client,
    what: &str,
    collection: String,
    name: &str,
    restores: &Restores,
) -> channel::Receiver<Observed<T>> {
    let spec = WatchSpec {
        name: format!("the {what} {name}"),
        path: collection,
        label_selector: None,
        // RBAC with resourceNames allows list and watch only with this selector.
        field_selector: Some(format!("metadata.name={name}")),
    };
    let (sender, receiver) = channel::channel(Observed::Unknown);
    let client = client.clone();
    let restores = restores.clone();
    let mut listing = None;
    tasks.spawn(async move {
        let sink = |event| {
            if let Some(observed) = observe(&mut listing, event) {
                sender.send_replace(observed);
            }
        };
        run(client, spec, restores, sink).await;
    });
    receiver
}

/// What an event says of the object. During a list only the end of the list says that the object is absent.
fn observe<T>(listing: &mut Option<Observed<T>>, event: Event<T>) -> Option<Observed<T>> {
    let observed = match event {
        Event::Init => {
            *listing = Some(Observed::Absent);
            return None;
        }
        Event::InitDone(_) => return listing.take(),
        Event::Bookmark => return None,
        // It exists, and nothing new is known of it.
        Event::Undecodable(_) => {
            *listing = None;
            return None;
        }
        Event::Apply(object) => Observed::Present(Arc::new(object)),
        Event::Delete(_) => Observed::Absent,
    };
    match listing {
        Some(listed) => {
            *listed = observed;
            None
        }
        None => Some(observed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::Undecodable;

    #[test]
    fn only_a_complete_list_or_an_event_after_it_changes_what_is_observed() {
        let mut listing = None;
        let mut see = |event| match observe(&mut listing, event) {
            None => "nothing new".to_owned(),
            Some(observed) => format!("{observed:?}"),
        };
        for (event, expected) in [
            (Event::Init, "nothing new"),
            (Event::InitDone("1".to_owned()), "Absent"),
            (Event::Apply(2), "Present(2)"),
            (Event::Init, "nothing new"),
            (Event::Apply(3), "nothing new"),
            (Event::InitDone("4".to_owned()), "Present(3)"),
            (Event::Bookmark, "nothing new"),
            (Event::Delete(3), "Absent"),
            // This list breaks off; the next one replaces it.
            (Event::Init, "nothing new"),
            (Event::Apply(5), "nothing new"),
            (Event::Init, "nothing new"),
            (Event::InitDone("6".to_owned()), "Absent"),
            (Event::Undecodable(Undecodable::default()), "nothing new"),
            (Event::Init, "nothing new"),
            (Event::Undecodable(Undecodable::default()), "nothing new"),
            (Event::InitDone("7".to_owned()), "nothing new"),
        ] {
            assert_eq!(see(event), expected);
        }
    }
}
