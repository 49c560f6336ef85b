//! An audit as JUnit XML: a test case for each source, which fails if there is drift.

use std::collections::BTreeMap;

use crate::inspect::audit::{Audit, Finding};
use lockstep_core::object::Kind;

pub fn render(audit: &Audit) -> String {
    let sources = audit.statuses.iter().map(|status| &status.key);
    let mut cases: BTreeMap<(Kind, String), Vec<&Finding>> =
        sources.map(|key| ((key.kind, key.to_string()), Vec::new())).collect();
    for finding in audit.findings.iter().filter(|finding| finding.rule.is_drift()) {
        let of_source = (finding.kind, finding.source.clone());
        // A stray object is a case of its own.
        let is_known = cases.contains_key(&of_source);
        let case = if is_known { of_source } else { (finding.kind, finding.object.clone()) };
        cases.entry(case).or_default().push(finding);
    }
    let failures = cases.values().filter(|findings| !findings.is_empty()).count();
    let skipped = audit.not_seen.len();
    let mut xml = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    xml.push_str(&format!(
        "<testsuites>\n  <testsuite name=\"lockstep audit\" tests=\"{}\" failures=\"{failures}\" skipped=\"{skipped}\">\n",
        cases.len() + skipped
    ));
    for ((kind, name), findings) in &cases {
        let case = format!("    <testcase classname=\"{kind}\" name=\"{}\"", escape(name));
        if findings.is_empty() {
            xml.push_str(&format!("{case}/>\n"));
            continue;
        }
        let lines: Vec<String> = findings
            .iter()
            .map(|one| format!("{} {}: {}", one.rule.name(), one.object, one.message))
            .collect();
        let more = if lines.len() > 1 { format!(", and {} more", lines.len() - 1) } else { String::new() };
        let message = format!("{}{more}", lines[0]);
        xml.push_str(&format!(
            "{case}>\n      <failure type=\"{}\" message=\"{}\">{}</failure>\n    </testcase>\n",
            findings[0].rule.name(),
            escape(&message),
            escape(&lines.join("\n"))
        ));
    }
    for gap in &audit.not_seen {
        xml.push_str(&format!(
            "    <testcase classname=\"not seen\" name=\"{}\"><skipped/></testcase>\n",
            escape(gap)
        ));
    }
    xml + "  </testsuite>\n</testsuites>\n"
}

/// XML has no way to write most control characters.
fn escape(text: &str) -> String {
    let escape = |char| match char {
        '&' => "&amp;".to_owned(),
        '<' => "&lt;".to_owned(),
        '>' => "&gt;".to_owned(),
        '"' => "&quot;".to_owned(),
        '\n' => "&#10;".to_owned(),
        char if char.is_control() || matches!(char, '\u{fffe}' | '\u{ffff}') => "\u{fffd}".to_owned(),
        char => char.to_string(),
    };
    text.chars().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspect::audit::{AuditVerdict, Rule};

    #[test]
    fn drift_is_a_failed_case_and_texts_are_escaped() {
        let finding = |rule, object: &str| Finding {
            rule,
            kind: Kind::ConfigMap,
            object: object.to_owned(),
            source: String::new(),
            message: "a<b> & \"c\"\u{7}".to_owned(),
        };
        let audit = Audit {
            verdict: AuditVerdict::Drift,
            findings: vec![finding(Rule::Stray, "home/a"), finding(Rule::Ineffective, "home/b")],
            sources: 0,
            companions: 0,
            not_seen: vec!["secrets".to_owned()],
            statuses: Vec::new(),
        };
        let xml = render(&audit);
        assert!(xml.contains("tests=\"2\" failures=\"1\" skipped=\"1\""), "{xml}");
        assert!(xml.contains("a&lt;b&gt; &amp; &quot;c&quot;\u{fffd}"), "{xml}");
        assert!(!xml.contains("home/b"), "what is no drift does not fail a pipeline: {xml}");
    }
}
