//! Writes private files, and reads lines and the tail of a log.

use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::Error;

/// Writes a new file that only its owner can read. An existing file is an error.
pub(crate) fn write_private(path: &Path, content: &str) -> Result<(), Error> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .and_then(|mut file| file.write_all(content.as_bytes()))
        .map_err(Error::at(path))
}

/// The last `count` lines of a text file, to explain an error; empty if it cannot be read.
pub(crate) fn tail(path: &Path, count: usize) -> String {
    let content = fs::read(path).unwrap_or_default();
    let content = String::from_utf8_lossy(&content);
    let lines: Vec<&str> = content.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

/// The lines of a stream as they come. What is not UTF-8 is replaced, so that the stream is read to its end.
pub(crate) fn lines(stream: impl Read) -> impl Iterator<Item = String> {
    let lines = BufReader::new(stream).split(b'\n').map_while(Result::ok);
    lines.map(|line| String::from_utf8_lossy(&line).into_owned())
}
