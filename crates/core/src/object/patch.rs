//! Operations of JSON patches (RFC 6902), addressed by path segments: `/` and `~` in keys are escaped.

use json_patch::{
    AddOperation, PatchOperation, RemoveOperation, ReplaceOperation, TestOperation, jsonptr::PointerBuf,
};
use serde_json::Value;

/// Sets a field or an entry of a map, whether it is there or not. Its parent must be there.
pub fn add(path: &[&str], value: Value) -> PatchOperation {
    PatchOperation::Add(AddOperation { path: pointer(path), value })
}

/// Removes what must be there.
pub fn remove(path: &[&str]) -> PatchOperation {
    PatchOperation::Remove(RemoveOperation { path: pointer(path) })
}

/// Makes the whole patch fail unless this value is there.
pub fn test(path: &[&str], value: Value) -> PatchOperation {
    PatchOperation::Test(TestOperation { path: pointer(path), value })
}

/// Makes the API server refuse the patch (409) for any other version of the object. A `test` that fails would read as
/// an invalid request instead.
pub(crate) fn only_if_version(resource_version: &str) -> PatchOperation {
    PatchOperation::Replace(ReplaceOperation {
        path: pointer(&["metadata", "resourceVersion"]),
        value: Value::String(resource_version.to_owned()),
    })
}

fn pointer(path: &[&str]) -> PointerBuf {
    PointerBuf::from_tokens(path.iter().copied())
}
