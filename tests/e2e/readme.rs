//! Every test that tests/README.md names exists.

use std::{fs, path::Path};

/// Where unit tests are.
const SOURCES: [&str; 4] = ["src", "crates/core/src", "crates/cluster/src", "crates/cli/src"];

#[test]
fn every_test_named_in_the_readme_exists() {
    let readme = include_str!("../README.md");
    let rows = readme.lines().filter(|line| line.starts_with("| "));
    let mut named = 0;
    let mut missing = Vec::new();
    for row in rows {
        // The columns: behaviour, end-to-end tests, unit tests.
        let columns: Vec<&str> = row.trim_matches('|').split(" | ").collect();
        for (column, dirs) in [(1, &["tests/e2e"][..]), (2, &SOURCES)] {
            let cell = columns.get(column).copied().unwrap_or_default();
            for test in cell.split('`').filter(|text| text.contains("::")) {
                named += 1;
                if !dirs.iter().any(|dir| exists(dir, test)) {
                    missing.push(test);
                }
            }
        }
    }
    assert!(named > 150, "only {named} tests are named: has the format of the tables changed?");
    assert!(missing.is_empty(), "tests/README.md names tests that do not exist: {missing:#?}");
}

/// Whether a test exists in the file of its module; an inline module `tests` is in the file of its parent.
pub fn exists(dir: &str, test: &str) -> bool {
    let (module, name) = test.rsplit_once("::").expect("a module");
    let file = |module: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(dir).join(module.replace("::", "/"));
        fs::read_to_string(path.with_extension("rs")).unwrap_or_default()
    };
    let parent = module.strip_suffix("::tests").unwrap_or(module);
    [module, parent].iter().any(|module| file(module).contains(&format!("fn {name}(")))
}
