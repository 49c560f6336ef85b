//! An audit in the Static Analysis Results Interchange Format (SARIF 2.1.0), for code scanning.

use serde_json::{Value, json};

use crate::inspect::audit::{Audit, Finding, RULES, Rule};
use lockstep_core::admission::messages;

pub fn render(audit: &Audit) -> serde_json::Result<String> {
    let rules = RULES.map(|(rule, name, description)| {
        json!({
            "id": name,
            "shortDescription": {"text": description},
            "defaultConfiguration": {"level": level(rule)},
        })
    });
    let log = json!({
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{
            "tool": {"driver": {
                "name": "lockstep audit",
                "version": env!("CARGO_PKG_VERSION"),
                "rules": rules,
            }},
            "results": audit.findings.iter().map(result).collect::<Vec<_>>(),
            "invocations": [{
                "executionSuccessful": audit.not_seen.is_empty(),
                "toolExecutionNotifications": audit.not_seen.iter().map(|gap| json!({
                    "level": "error", "message": {"text": format!("not seen: {gap}")},
                })).collect::<Vec<_>>(),
            }],
        }],
    });
    Ok(serde_json::to_string_pretty(&log)? + "\n")
}

fn level(rule: Rule) -> &'static str {
    if rule.is_drift() { "error" } else { "note" }
}

fn result(finding: &Finding) -> Value {
    let place = format!("{}/{}", messages::kind(finding.kind), finding.object);
    json!({
        "ruleId": finding.rule.name(),
        "level": level(finding.rule),
        "message": {"text": format!("{}: {}", finding.object, finding.message)},
        "locations": [{
            // SARIF viewers require a file and a line; the object's path stands in for a file.
            "physicalLocation": {"artifactLocation": {"uri": place}, "region": {"startLine": 1}},
            "logicalLocations": [{"fullyQualifiedName": place, "kind": "object"}],
        }],
        "partialFingerprints": {"finding/v1": format!("{} {place} {}", finding.rule.name(), finding.message)},
    })
}
