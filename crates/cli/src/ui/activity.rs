//! PURE. What has happened: Events on sources, and denials. Bounded, because tenants cause it.

use std::collections::VecDeque;

use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};

use lockstep_core::{
    keys::Keys,
    object::{Meta, watched::Watched},
    text::shorten,
};

/// How much of what has happened is kept.
const MAX_ENTRIES: usize = 300;
/// The API server accepts notes of 1 KiB.
const MAX_NOTE_CHARS: usize = 1000;

/// An Event as the API server sends it, with the fields that we use.
#[derive(Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EventObject {
    metadata: Meta,
    reporting_controller: String,
    reason: String,
    #[serde(rename = "type")]
    type_: String,
    note: String,
    regarding: Regarding,
    event_time: Option<Timestamp>,
    series: Option<EventSeries>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
pub struct Regarding {
    kind: String,
    namespace: String,
    name: String,
}

#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct EventSeries {
    count: u64,
    last_observed_time: Timestamp,
}

impl Watched for EventObject {
    fn meta(&self) -> &Meta {
        &self.metadata
    }
}

/// Something that has happened.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// An Event that repeats is one entry that moves up.
    pub id: String,
    pub time: Timestamp,
    pub kind: EntryKind,
    pub reason: String,
    pub note: String,
    pub count: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<Regarding>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum EntryKind {
    Heal,
    Normal,
    Warning,
    Denial,
}

impl Entry {
    /// An Event of this instance; none if somebody else has reported it.
    pub fn of(event: EventObject, keys: &Keys) -> Option<Self> {
        let meta = event.metadata;
        let time = event.series.as_ref().map(|series| series.last_observed_time).or(event.event_time)?;
        (event.reporting_controller == keys.instance).then(|| Self {
            id: format!("{}/{}", meta.namespace, meta.name),
            time,
            kind: match (event.type_.as_str(), event.reason.as_str()) {
                ("Warning", _) => EntryKind::Warning,
                (_, "Healed") => EntryKind::Heal,
                _ => EntryKind::Normal,
            },
            note: shorten(&event.note, MAX_NOTE_CHARS),
            reason: event.reason,
            count: event.series.map_or(1, |series| series.count),
            source: Some(event.regarding),
        })
    }
}

/// The newest entries, in the order of their time.
#[derive(Default, Serialize)]
pub struct Activity(VecDeque<Entry>);

impl Activity {
    /// Returns whether the entry is new, or has changed.
    pub fn add(&mut self, entry: Entry) -> bool {
        if let Some(at) = self.0.iter().position(|known| known.id == entry.id) {
            if self.0[at] == entry {
                return false;
            }
            self.0.remove(at);
        }
        let at = self.0.partition_point(|known| known.time <= entry.time);
        if at == 0 && self.0.len() == MAX_ENTRIES {
            return false;
        }
        self.0.insert(at, entry);
        if self.0.len() > MAX_ENTRIES {
            self.0.pop_front();
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_core::testing;

    fn event(name: &str, second: i64, count: u64) -> EventObject {
        let at = |second| Timestamp::from_second(second).unwrap();
        serde_json::from_value(serde_json::json!({
            "metadata": {"namespace": "home", "name": name},
            "reportingController": testing::keys().instance,
            "reason": "Healed", "type": "Normal", "note": "healed 1: away/colors-synced (content)",
            "regarding": {"kind": "ConfigMap", "namespace": "home", "name": "colors"},
            "eventTime": at(second),
            "series": if count > 1 { Some(serde_json::json!({"count": count, "lastObservedTime": at(second)})) } else { None },
        }))
        .unwrap()
    }

    #[test]
    fn repeated_event_is_one_entry_that_moves_up() {
        let (mut activity, keys) = (Activity::default(), testing::keys());
        let mut add = |event| activity.add(Entry::of(event, &keys).unwrap());
        assert!(add(event("a", 1, 1)));
        assert!(add(event("b", 2, 1)));
        assert!(!add(event("b", 2, 1)), "nothing new");
        assert!(add(event("a", 3, 2)));
        let seen: Vec<_> = activity.0.iter().map(|entry| (entry.id.as_str(), entry.count)).collect();
        assert_eq!(seen, [("home/b", 1), ("home/a", 2)]);
    }

    #[test]
    fn only_the_newest_entries_are_kept() {
        let (mut activity, keys) = (Activity::default(), testing::keys());
        for n in 0..1000 {
            activity.add(Entry::of(event(&format!("e{n}"), n, 1), &keys).unwrap());
        }
        assert!(!activity.add(Entry::of(event("old", 1, 1), &keys).unwrap()));
        assert_eq!(activity.0.len(), MAX_ENTRIES);
        assert_eq!(activity.0.iter().last().unwrap().id, "home/e999");
    }

    #[test]
    fn event_of_another_controller_is_left_out() {
        let mut foreign = event("a", 1, 1);
        foreign.reporting_controller = "kubelet".to_owned();
        assert_eq!(Entry::of(foreign, &testing::keys()), None);
    }
}
