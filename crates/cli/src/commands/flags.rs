//! Values of flags that several commands have.

use std::time::Duration;

use clap::ValueEnum;
use k8s_openapi::jiff::{Span, SpanRelativeTo};

use lockstep_core::object::Kind;

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum KindName {
    Configmaps,
    Secrets,
}

impl From<KindName> for Kind {
    fn from(name: KindName) -> Self {
        match name {
            KindName::Configmaps => Self::ConfigMap,
            KindName::Secrets => Self::Secret,
        }
    }
}

/// `90s`, `5m`, `1h30m`, `365d`.
pub fn duration(text: &str) -> Result<Duration, String> {
    let bad = || "expected a duration such as `30s`, `5m` or `365d`".to_owned();
    let span: Span = text.parse().map_err(|_| bad())?;
    let signed = span.to_duration(SpanRelativeTo::days_are_24_hours()).map_err(|_| bad())?;
    Duration::try_from(signed).map_err(|_| bad())
}

/// Times in certificates are whole seconds, so a shorter validity would have certificates replaced without a pause.
pub fn validity(text: &str) -> Result<Duration, String> {
    duration(text).and_then(|duration| {
        if duration < Duration::from_secs(5) { Err("expected at least 5s".to_owned()) } else { Ok(duration) }
    })
}

pub fn positive_duration(text: &str) -> Result<Duration, String> {
    duration(text).and_then(|duration| {
        if duration.is_zero() { Err("expected more than 0s".to_owned()) } else { Ok(duration) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units_and_lower_bounds() {
        for (text, seconds) in [("30s", 30), ("5m", 300), ("1h30m", 5400), ("365d", 31_536_000), ("0s", 0)] {
            assert_eq!(duration(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for text in ["", "5", "-5s", "soon", "1mo"] {
            assert!(duration(text).is_err(), "{text}");
        }
        assert!(positive_duration("0s").is_err());
        for text in ["0s", "500ms", "4s"] {
            assert!(validity(text).is_err(), "{text}");
        }
        assert_eq!(validity("5s"), Ok(Duration::from_secs(5)));
    }
}
