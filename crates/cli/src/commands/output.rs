//! How commands print: tables as kubectl prints them, JSON and YAML.

use std::{
    io::{self, Write},
    process::ExitCode,
};

use anyhow::Context;
use clap::ValueEnum;
use serde::Serialize;

#[derive(Clone, Copy, PartialEq, Default, ValueEnum)]
pub enum Format {
    /// A table
    #[default]
    Table,
    /// A table with more columns
    Wide,
    Json,
    Yaml,
}

/// Rows of text under a header, in columns as wide as their widest cell.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new(header: &[&str]) -> Self {
        Self { rows: vec![header.iter().map(ToString::to_string).collect()] }
    }

    pub fn add(&mut self, row: &[&dyn ToString]) {
        self.rows.push(row.iter().map(|cell| cell.to_string()).collect());
    }

    /// The lines, the header first. The last column is as long as its texts.
    pub fn lines(&self) -> Vec<String> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or_default();
        let width = |column: usize| {
            self.rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max()
        };
        let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or_default()).collect();
        let line = |row: &Vec<String>| {
            let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
            cells.collect::<Vec<_>>().join("   ").trim_end().to_owned()
        };
        self.rows.iter().map(line).collect()
    }
}

/// Says on standard error what a person should know besides the output. If nobody reads it, that is no error.
pub fn note(text: &str) {
    let _ = writeln!(io::stderr(), "note: {}", printable(text));
}

/// Says on standard error why a command failed.
pub fn complain(error: &anyhow::Error) {
    let _ = writeln!(io::stderr(), "lockstep: {}", printable(&format!("{error:#}")));
}

/// The exit code that a command ends with; `failed` for an error, which is printed, where 1 has a meaning of its own.
pub(crate) fn exit_code(outcome: anyhow::Result<u8>, failed: u8) -> anyhow::Result<ExitCode> {
    Ok(ExitCode::from(outcome.unwrap_or_else(|error| {
        complain(&error);
        failed
    })))
}

/// Prints a text. A reader that has seen enough, such as `head`, is no error: the exit code still says what was found.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(printable(text).as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        outcome => outcome.context("standard output cannot be written"),
    }
}

/// Without control characters: tenants write names and annotations that messages quote, and a terminal obeys them.
pub(crate) fn printable(text: &str) -> String {
    let printable =
        |char: char| if char.is_control() && char != '\n' { char::REPLACEMENT_CHARACTER } else { char };
    text.chars().map(printable).collect()
}

/// Prints a value as JSON or YAML.
pub(crate) fn print_value(format: Format, value: &impl Serialize) -> anyhow::Result<()> {
    let text = match format {
        Format::Yaml => serde_saphyr::to_string(value).context("the YAML cannot be written")?,
        _ => serde_json::to_string_pretty(value).context("the JSON cannot be written")? + "\n",
    };
    print(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        assert_eq!(printable("a\x1b[2J\rb\u{9b}c\n"), "a\u{fffd}[2J\u{fffd}b\u{fffd}c\n");
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&["NAME", "STATE"]);
        table.add(&[&"größe", &"in step"]);
        table.add(&[&"b", &"1 conflict"]);
        assert_eq!(table.lines(), ["NAME    STATE", "größe   in step", "b       1 conflict"]);
    }
}
