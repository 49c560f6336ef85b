//! PURE. The formats in which `/metrics` answers: OpenMetrics, and the text format that every tool reads.

/// A format of metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpositionFormat {
    OpenMetrics,
    /// Version 0.0.4 of Prometheus' own format.
    Text,
}

const OPENMETRICS: &str = "application/openmetrics-text";

impl ExpositionFormat {
    /// The format that a client prefers, by the values of its `Accept` headers. OpenMetrics is only for those that name
    /// it: `*/*` means that a client does not know either.
    pub fn accepted<'a>(accept: impl IntoIterator<Item = &'a str>) -> Self {
        let mut open_metrics = 0.0_f64;
        let mut text = 0.0_f64;
        for range in accept.into_iter().flat_map(|value| value.split(',')) {
            let mut parts = range.split(';').map(str::trim);
            let kind = parts.next().unwrap_or_default().to_ascii_lowercase();
            let quality = parts.find_map(|part| part.strip_prefix("q=")?.trim().parse().ok()).unwrap_or(1.0);
            match kind.as_str() {
                OPENMETRICS => open_metrics = open_metrics.max(quality),
                "text/plain" | "text/*" | "*/*" => text = text.max(quality),
                _ => {}
            }
        }
        if open_metrics > 0.0 && open_metrics >= text { Self::OpenMetrics } else { Self::Text }
    }

    pub const fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// Writes OpenMetrics in the text format. In OpenMetrics, the help and type of a counter name it without `_total`; in
/// the text format, they name its series, and a reader would take them for those of another metric. `# EOF` and
/// `# UNIT` have no meaning there.
pub fn as_plain_text(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len());
    let mut help = None;
    for line in open_metrics.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ');
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            let suffix = if kind == "counter" { "_total" } else { "" };
            if let Some((_, help)) = help.take() {
                text += &format!("# HELP {name}{suffix} {help}\n");
            }
            text += &format!("# TYPE {name}{suffix} {kind}\n");
        } else if !line.starts_with('#') {
            text += line;
            text.push('\n');
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_metrics_is_sent_only_to_clients_that_prefer_it() {
        use ExpositionFormat::{OpenMetrics, Text};
        // As Prometheus 2 and 3 send it.
        let prometheus2 = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;\
                           q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        let prometheus3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,\
                           application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;\
                           escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,/;q=0.1";
        for (accept, format) in [
            (&[][..], Text),
            (&["*/*"], Text),
            (&["text/plain"], Text),
            (&["text/html, */*;q=0.8"], Text),
            (&["application/openmetrics-text"], OpenMetrics),
            (&["Application/OpenMetrics-Text; version=1.0.0"], OpenMetrics),
            (&["text/plain", "application/openmetrics-text;q=0.5"], Text),
            (&["text/plain;q=0.2", "application/openmetrics-text;q=0.5"], OpenMetrics),
            (&["application/openmetrics-text;q=0"], Text),
            (&[prometheus2], OpenMetrics),
            (&[prometheus3], OpenMetrics),
        ] {
            assert_eq!(ExpositionFormat::accepted(accept.iter().copied()), format, "{accept:?}");
        }
    }

    #[test]
    fn help_and_type_of_counters_name_their_series_in_the_text_format() {
        let open_metrics = "# HELP a Help of a.\n# TYPE a counter\na_total{b=\"c\"} 1\n# HELP d Help of d.\n\
                            # TYPE d gauge\n# UNIT d seconds\nd 2\n# EOF\n";
        let text = "# HELP a_total Help of a.\n# TYPE a_total counter\na_total{b=\"c\"} 1\n# HELP d Help of d.\n\
                    # TYPE d gauge\nd 2\n";
        assert_eq!(as_plain_text(open_metrics), text);
    }
}
