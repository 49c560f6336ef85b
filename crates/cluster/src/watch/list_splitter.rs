//! PURE. Splits a list into its objects while it is received, so that one object at a time is in memory: fifty objects
//! can have 75 MiB, and parsed twice as much.

use kube::core::ListMeta;
use serde::{Deserialize, de::DeserializeOwned};

use super::decode::Undecodable;
use crate::watch::decode;

/// The JSON of a list: an object with an array of objects in it.
#[derive(Default)]
pub struct ListSplitter {
    /// How many objects and arrays are open.
    depth: usize,
    /// The second of those is an array, so that the third one is an object of the list.
    in_items: bool,
    in_string: bool,
    escaped: bool,
    /// The object that is not complete yet.
    object: Vec<u8>,
    /// The list without its objects.
    list: Vec<u8>,
}

/// A list without its objects.
#[derive(Deserialize)]
pub struct List {
    pub metadata: ListMeta,
}

impl ListSplitter {
    /// Takes the next bytes, and hands on each object that they complete.
    pub fn push<T: DeserializeOwned>(&mut self, bytes: &[u8], mut sink: impl FnMut(Result<T, Undecodable>)) {
        let mut from = 0;
        for (at, byte) in bytes.iter().enumerate() {
            if self.in_string {
                match byte {
                    _ if self.escaped => self.escaped = false,
                    b'\\' => self.escaped = true,
                    b'"' => self.in_string = false,
                    _ => {}
                }
                continue;
            }
            match byte {
                b'"' => self.in_string = true,
                b'{' | b'[' => {
                    if self.depth == 1 {
                        self.in_items = *byte == b'[';
                    }
                    if self.depth == 2 && self.in_items {
                        self.list.extend_from_slice(&bytes[from..at]);
                        from = at;
                    }
                    self.depth += 1;
                }
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 2 && self.in_items {
                        self.object.extend_from_slice(&bytes[from..=at]);
                        from = at + 1;
                        sink(decode::object(&self.object));
                        self.object.clear();
                    }
                }
                b',' if self.depth == 2 && self.in_items => {
                    self.list.extend_from_slice(&bytes[from..at]);
                    from = at + 1;
                }
                _ => {}
            }
        }
        let left = if self.depth > 2 && self.in_items { &mut self.object } else { &mut self.list };
        left.extend_from_slice(&bytes[from..]);
    }

    /// The list has ended: its metadata.
    pub fn finish(self) -> Result<ListMeta, serde_json::Error> {
        serde_json::from_slice::<List>(&self.list).map(|list| list.metadata)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    proptest! {
        #[test]
        fn list_in_any_pieces_yields_its_objects_and_metadata(
            texts in proptest::collection::vec(r#"[\[\]{}",\\a ü]{0,6}"#, 0..5),
            cuts in proptest::collection::vec(0_usize..400, 0..6),
            pretty in any::<bool>(),
            metadata_last in any::<bool>(),
        ) {
            let object = |text: &String| json!({"metadata": {"name": text, "tags": [[text], {}]}, text.as_str(): []});
            let objects: Vec<Value> = texts.iter().map(object).collect();
            let items = json!({"items": objects}).to_string();
            let head = r#"{"kind":"ConfigMapList","metadata":{"continue":"a[{","resourceVersion":"7","x":[{}]}}"#;
            let (first, second) = if metadata_last { (&*items, head) } else { (head, &*items) };
            let mut text = format!("{},{}", &first[..first.len() - 1], &second[1..]);
            if pretty {
                text = serde_json::to_string_pretty(&serde_json::from_str::<Value>(&text).unwrap()).unwrap();
            }
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let (mut splitter, mut found) = (ListSplitter::default(), Vec::<Value>::new());
            for piece in cuts.windows(2) {
                splitter.push(&text.as_bytes()[piece[0]..piece[1]], |object| found.push(object.unwrap()));
                prop_assert!(splitter.object.len() <= text.len());
            }
            prop_assert_eq!(found, objects);
            let metadata = splitter.finish().unwrap();
            prop_assert_eq!(metadata.continue_.as_deref(), Some("a[{"));
            prop_assert_eq!(metadata.resource_version.as_deref(), Some("7"));
        }
    }

    #[test]
    fn list_without_objects_and_malformed_lists_are_read_as_such() {
        let read = |text: &str| {
            let (mut splitter, mut found) = (ListSplitter::default(), Vec::new());
            splitter.push(text.as_bytes(), |object: Result<Value, _>| found.push(object.is_ok()));
            splitter.finish().map(|_| found)
        };
        assert_eq!(read(r#"{"metadata":{},"items":null}"#).unwrap(), [true; 0]);
        assert_eq!(read(r#"{"metadata":{},"items":[{}]}"#).unwrap(), [true]);
        assert_eq!(read(r#"{"metadata":{},"items":[{a},{}]}"#).unwrap(), [false, true]);
        for text in ["", "{", "}}]]", r#"{"metadata":{},"items":[{}"#] {
            assert!(read(text).is_err(), "{text}");
        }
    }
}
