//! Fails when the top-level modules of a crate depend on each other in a cycle. Test code does not count.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

type Graph = BTreeMap<String, BTreeSet<String>>;

/// The modules that a source file names after `crate::`, in `use` declarations and elsewhere.
fn references(source: &str) -> BTreeSet<String> {
    // Unit tests are at the end of a file.
    let (code, _) = source.split_once("#[cfg(test)]\nmod tests {").unwrap_or((source, ""));
    let lines: Vec<&str> = code.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    let code = lines.join("\n");
    code.split("crate::")
        .skip(1)
        .flat_map(|path| match path.strip_prefix('{') {
            Some(group) => group_members(group),
            None => vec![first_name(path)],
        })
        .collect()
}

/// The first name of each item in a `use` group whose opening brace was read.
fn group_members(group: &str) -> Vec<String> {
    let mut depth = 0;
    let mut members = vec![first_name(group)];
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => members.push(first_name(&group[at + 1..])),
            _ => {}
        }
    }
    members
}

fn first_name(text: &str) -> String {
    text.trim_start().chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect()
}

fn add_files(graph: &mut Graph, directory: &Path, module: Option<&str>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let is_root = module.is_none() && ["lib", "main", "testing"].contains(&&*name);
        if is_root || name == "tests" {
            continue;
        }
        let module = module.unwrap_or(&name);
        if path.is_dir() {
            add_files(graph, &path, Some(module));
        } else {
            let found = references(&fs::read_to_string(&path).unwrap());
            graph.entry(module.to_owned()).or_default().extend(found);
        }
    }
}

/// The part of a graph that is left when modules without dependencies are removed repeatedly: the cycles, and the
/// modules that depend on them.
fn cycles(mut graph: Graph) -> Graph {
    loop {
        let modules: BTreeSet<String> = graph.keys().cloned().collect();
        for (module, uses) in &mut graph {
            uses.retain(|used| used != module && modules.contains(used));
        }
        graph.retain(|_, uses| !uses.is_empty());
        if graph.len() == modules.len() {
            return graph;
        }
    }
}

#[test]
fn top_level_modules_have_no_cycles() {
    for source in ["src", "crates/core/src", "crates/cluster/src", "crates/cli/src"] {
        let mut graph = Graph::new();
        add_files(&mut graph, &Path::new(env!("CARGO_MANIFEST_DIR")).join(source), None);
        assert!(graph.len() >= 3 && graph.len() <= 12, "{source} has few top-level modules: {graph:?}");
        assert!(graph.values().any(|uses| !uses.is_empty()), "{graph:?}");
        assert_eq!(cycles(graph), Graph::new(), "{source}: module -> modules that it uses");
    }
}

#[test]
fn references_are_found_in_groups_and_in_paths_outside_of_tests() {
    let source = "\
use crate::{
    client::{self, Failure},
    keys,
};
// crate::comment is not code.
fn f(_: crate::object::Kind) {}
#[cfg(test)]
mod tests {
    use crate::testing::keys;
}";
    let expected = ["", "client", "keys", "object"].map(str::to_owned);
    assert_eq!(references(source), expected.into());
}

#[test]
fn cycles_are_found() {
    let graph = |edges: &[(&str, &str)]| {
        let mut graph = Graph::new();
        for (from, to) in edges {
            graph.entry((*from).to_owned()).or_default().insert((*to).to_owned());
            graph.entry((*to).to_owned()).or_default();
        }
        graph
    };
    assert!(cycles(graph(&[("a", "b"), ("b", "c"), ("a", "c")])).is_empty());
    let found = cycles(graph(&[("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")]));
    assert_eq!(found.keys().collect::<Vec<_>>(), ["a", "b", "c"]);
}
