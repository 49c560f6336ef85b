//! The patches of `make mutants` fit the code, and the tests that they name exist. Whether these tests catch them is
//! what `make mutants` shows.

use std::{fs, path::Path, process::Command};

use crate::readme::exists;

#[test]
fn every_mutant_applies_and_names_tests_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let has_git = Command::new("git").arg("--version").output().is_ok();
    if !has_git {
        controlplane::skip("in part: there is no git");
    }
    let mut mutants = 0;
    for file in fs::read_dir(root.join("tests/mutants")).expect("a directory") {
        let path = file.expect("a file").path();
        if path.extension().is_none_or(|extension| extension != "patch") {
            continue;
        }
        mutants += 1;
        let name = path.display();
        let text = fs::read_to_string(&path).expect("a patch");
        let header = text.lines().take_while(|line| !line.starts_with("diff "));
        let (mut broken, mut tests) = (0, 0);
        for line in header {
            if line.starts_with("Broken: ") {
                broken += 1;
            } else if let Some(test) = line.strip_prefix("Test: ") {
                let unit = test.strip_prefix("--package ").and_then(|test| test.split_once(" --lib "));
                let unit = unit.map(|(package, test)| match package.strip_prefix("lockstep-") {
                    Some(name) => (format!("crates/{name}/src"), test),
                    None => ("src".to_owned(), test),
                });
                let end_to_end = || Some(("tests/e2e".to_owned(), test.strip_prefix("--test e2e ")?));
                let (dir, test) =
                    unit.or_else(end_to_end).expect("`--package … --lib` or `--test e2e`, and a test");
                assert!(exists(&dir, test), "{name} names a test that does not exist: {test}");
                tests += 1;
            }
        }
        assert!(broken == 1 && tests > 0, "{name} says what is broken, and which tests show it");
        if has_git {
            let mut git = Command::new("git");
            // In a copy of the tree inside another repository, git would skip every file.
            git.env("GIT_CEILING_DIRECTORIES", root.parent().expect("a parent")).current_dir(root);
            let output = git.args(["apply", "--check"]).arg(&path).output().expect("git");
            let why = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{name} does not fit the code any more: {why}");
        }
    }
    assert!(mutants >= 12, "there are {mutants} mutants");
}
