//! Tests that cannot check something on this machine. Rust's test harness counts them as passed, so they say so here,
//! and `make` prints how many there were.

use std::fs::OpenOptions;
use std::io::{Write, stderr};
use std::{env, thread};

/// A file to which every skipped test appends a line.
const SKIPPED: &str = "LOCKSTEP_TEST_SKIPPED";

/// Says that the test on this thread is skipped, and why; a reason that begins with `in part: ` says that it does the
/// rest.
///
/// # Panics
/// When the file cannot be written: a test that nobody counts would look like one that passed.
pub fn skip(reason: &str) {
    let line = format!("{}: {reason}\n", thread::current().name().unwrap_or("a test"));
    // Not `eprint!`, which the test harness captures.
    drop(stderr().write_all(format!("skipped: {line}").as_bytes()));
    if let Some(path) = env::var_os(SKIPPED) {
        let file = OpenOptions::new().append(true).create(true).open(&path);
        let written = file.and_then(|mut file| file.write_all(line.as_bytes()));
        written.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
}
