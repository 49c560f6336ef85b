//! Logs: text on a terminal, JSON elsewhere. They never contain values of ConfigMaps and Secrets.

use std::io::IsTerminal;

use clap::ValueEnum;
use tracing_subscriber::{
    filter::{LevelFilter, Targets},
    fmt,
    layer::SubscriberExt as _,
    util::SubscriberInitExt as _,
};

pub use lockstep_core::failure::backoff::LogOnce;

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Format {
    Text,
    Json,
}

/// A filter with these levels in which some crates stay silent: kube-client logs whole responses that it cannot decode,
/// Secrets included, and hyper logs what it reads.
pub fn filter(levels: &str) -> Targets {
    const SILENT_CRATES: [&str; 6] = ["kube_client", "kube", "hyper", "hyper_util", "rustls", "tower"];
    let levels = levels.parse().unwrap_or_else(|_| Targets::new().with_default(LevelFilter::INFO));
    levels.with_targets(SILENT_CRATES.map(|silent| (silent, LevelFilter::OFF)))
}

/// Installs the global subscriber. It writes to standard error.
pub fn init(format: Option<Format>) {
    let format = format.unwrap_or(if std::io::stderr().is_terminal() { Format::Text } else { Format::Json });
    // A directive for a module of a silent crate would override the crate's, so only directives for ours are accepted.
    let levels = std::env::var("RUST_LOG")
        .ok()
        .filter(|levels| names_only_our_crate(levels))
        .unwrap_or_else(|| "info".into());
    let builder = fmt().with_max_level(LevelFilter::TRACE).with_writer(std::io::stderr).with_target(false);
    match format {
        Format::Text => {
            builder.with_ansi(std::io::stderr().is_terminal()).finish().with(filter(&levels)).init();
        }
        Format::Json => builder.json().flatten_event(true).finish().with(filter(&levels)).init(),
    }
}

/// Whether a filter names no other crate. A directive without `=` is a level, or a crate with all levels.
fn names_only_our_crate(levels: &str) -> bool {
    levels.split(',').all(|directive| {
        let level = directive.parse::<LevelFilter>().is_ok();
        level || directive.starts_with("lockstep")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::captured_logs::CapturedLogs;

    #[test]
    fn logs_of_kube_and_hyper_never_show() {
        for levels in ["info", "trace", "lockstep=trace"] {
            let captured = CapturedLogs::default();
            let capturing = captured.start(levels);
            // kube_client::client::Client::request logs like this.
            tracing::warn!(target: "kube_client::client", "hush");
            tracing::trace!(target: "hyper::proto::h1::io", "hush");
            tracing::info!(target: "lockstep::controller", "shown");
            drop(capturing);
            let text = captured.text();
            assert!(text.contains("shown"), "{levels}");
            assert!(!text.contains("hush"), "{levels}: {text}");
        }
    }

    #[test]
    fn filter_that_names_other_crates_is_rejected() {
        for levels in ["debug", "OFF", "lockstep=debug,info", "lockstep", "warn,lockstep::webhook=trace"] {
            assert!(names_only_our_crate(levels), "{levels}");
        }
        for levels in ["kube_client::client=warn", "info,kube=trace", "h2", "info,h2", "[span]=trace"] {
            assert!(!names_only_our_crate(levels), "{levels}");
        }
    }
}
