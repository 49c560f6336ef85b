//! PURE. Sources and companions as the page shows them, and what has changed since it was told last.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::inspect::status::{CompanionStatus, SourceStatus};

/// Every source, by `Kind/namespace/name`.
pub type Rows = BTreeMap<String, Row>;

/// A source, and its companions by `namespace/name`.
pub struct Row {
    head: SourceStatus,
    cells: BTreeMap<String, CompanionStatus>,
}

/// What the page is told. The first one says everything.
#[derive(Serialize)]
pub struct Changes<'a> {
    rows: Vec<RowChange<'a>>,
    removed: Vec<&'a str>,
}

#[derive(Serialize)]
struct RowChange<'a> {
    id: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    head: Option<&'a SourceStatus>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    cells: Vec<&'a CompanionStatus>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    gone: Vec<&'a str>,
}

/// The row of a source, with its key.
pub fn row(mut status: SourceStatus) -> (String, Row) {
    let companions = std::mem::take(&mut status.companions);
    let cells = companions.into_iter().map(|one| (one.at.to_string(), one)).collect();
    let id = format!("{}/{}", status.key.kind, status.key);
    (id, Row { head: status, cells })
}

/// What leads from one state to the other.
pub fn change<'a>(before: &'a Rows, now: &'a Rows) -> Changes<'a> {
    let rows = now.iter().filter_map(|(id, row)| row.change_since(before.get(id), id)).collect();
    let removed = before.keys().filter(|id| !now.contains_key(*id)).map(String::as_str).collect();
    Changes { rows, removed }
}

impl Changes<'_> {
    pub const fn is_empty(&self) -> bool {
        self.rows.is_empty() && self.removed.is_empty()
    }
}

impl Row {
    fn change_since<'a>(&'a self, before: Option<&'a Self>, id: &'a str) -> Option<RowChange<'a>> {
        let known = |key: &String| before.and_then(|before| before.cells.get(key));
        let changed = self.cells.iter().filter(|(key, cell)| known(key) != Some(*cell));
        let cells: Vec<_> = changed.map(|(_, cell)| cell).collect();
        let were = before.into_iter().flat_map(|before| before.cells.keys());
        let gone: Vec<_> = were.filter(|key| !self.cells.contains_key(*key)).map(String::as_str).collect();
        let head = Some(&self.head).filter(|head| before.map(|before| &before.head) != Some(*head));
        let is_same = head.is_none() && cells.is_empty() && gone.is_empty();
        (!is_same).then_some(RowChange { id, head, cells, gone })
    }

    /// Whether something has the name of a companion, or nothing: no watch shows that.
    pub fn has_open_questions(&self) -> bool {
        use crate::inspect::status::PlaceState::{Adopting, Conflict, Missing};
        self.cells.values().any(|cell| matches!(cell.state, Missing | Conflict(_) | Adopting))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::inspect::status::{PlaceState, SourceHealth};
    use lockstep_core::object::{Kind, ObjectKey};

    fn source(name: &str, cells: &[(&str, PlaceState)]) -> (String, Row) {
        let companion = |(namespace, state): &(&str, PlaceState)| CompanionStatus {
            at: ObjectKey::new(Kind::ConfigMap, namespace, &format!("{name}-synced")),
            state: state.clone(),
            message: state.to_string(),
            written: None,
        };
        row(SourceStatus {
            key: ObjectKey::new(Kind::ConfigMap, "home", name),
            targets: "*".to_owned(),
            wanted: cells.len(),
            in_step: cells.iter().filter(|(_, state)| *state == PlaceState::InStep).count(),
            not_seen: 0,
            changed: None,
            state: SourceHealth::InStep,
            healthy: true,
            message: "in step".to_owned(),
            troubles: Vec::new(),
            companions: cells.iter().map(companion).collect(),
        })
    }

    #[test]
    fn one_changed_companion_of_a_thousand_is_one_cell() {
        let many: Vec<(String, PlaceState)> =
            (0..1000).map(|n| (format!("n{n}"), PlaceState::InStep)).collect();
        let mut cells: Vec<(&str, PlaceState)> =
            many.iter().map(|(name, state)| (name.as_str(), state.clone())).collect();
        let before = Rows::from([source("big", &cells), source("other", &[])]);
        cells[7].1 = PlaceState::Missing;
        let now = Rows::from([source("big", &cells), source("other", &[])]);
        assert!(change(&now, &now).is_empty());
        let change = serde_json::to_value(change(&before, &now)).unwrap();
        assert_eq!(change["rows"].as_array().unwrap().len(), 1);
        assert_eq!(change["rows"][0]["head"]["inStep"], 999);
        let cell = json!({"namespace": "n7", "name": "big-synced", "state": "missing", "message": "missing"});
        assert_eq!(change["rows"][0]["cells"], json!([cell]));
    }

    #[test]
    fn companion_and_source_that_are_gone_are_named() {
        let (a, b) = (("a", PlaceState::InStep), ("b", PlaceState::InStep));
        let before = Rows::from([source("one", &[a.clone(), b]), source("two", &[])]);
        let now = Rows::from([source("one", &[a])]);
        let change = serde_json::to_value(change(&before, &now)).unwrap();
        assert_eq!(change["rows"][0]["gone"], json!(["b/one-synced"]));
        assert_eq!(change["removed"], json!(["ConfigMap/home/two"]));
        assert!(change["rows"][0].get("cells").is_none());
    }
}
