//! `lockstep audit`: finds drift in the whole cluster, and tells pipelines with its exit code.

mod junit;
mod sarif;

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::{Args, ValueEnum};

use super::{
    connection::{Connected, Connection},
    output::{Table, exit_code, print},
};
use crate::{
    commands::flags,
    inspect::{
        audit::{Audit as Report, AuditVerdict, audit},
        snapshot::read_strays,
    },
};
use lockstep_core::{
    failure::Failure,
    object::{Kind, Meta},
    text::counted,
};

/// How long to wait before the cluster is read again.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

#[derive(Clone, Copy, PartialEq, Default, ValueEnum)]
pub enum ReportFormat {
    #[default]
    Text,
    Json,
    Junit,
    Sarif,
}

#[derive(Args)]
#[command(after_help = "\
Reads only. Exit codes: 0 everything is in step, 1 drift, 2 cannot tell (an error, or objects that you may not see).

Examples:
  lockstep audit                              for people
  lockstep audit --wait 30s -o junit          in a pipeline, just after `kubectl apply`
  lockstep audit -o sarif > lockstep.sarif    for code scanning")]
pub struct AuditArgs {
    /// How to print it
    #[arg(short, long, value_enum, default_value_t)]
    pub output: ReportFormat,

    /// How long the controller may take to repair what is found before it counts
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = flags::duration)]
    pub wait: Duration,

    #[command(flatten)]
    pub connection: Connection,
}

/// An error means that nothing can be told.
pub async fn run(settings: &AuditArgs) -> anyhow::Result<ExitCode> {
    let verdict = try_run(settings).await.map(|verdict| verdict as u8);
    exit_code(verdict, AuditVerdict::CannotTell as u8)
}

async fn try_run(settings: &AuditArgs) -> anyhow::Result<AuditVerdict> {
    let start = Instant::now();
    let connected = settings.connection.open().await?;
    let report = loop {
        let report = read(&connected).await?;
        if report.verdict != AuditVerdict::Drift || start.elapsed() >= settings.wait {
            break report;
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    };
    print(&match settings.output {
        ReportFormat::Text => text(&report, start.elapsed()),
        ReportFormat::Json => serde_json::to_string_pretty(&report)? + "\n",
        ReportFormat::Junit => junit::render(&report),
        ReportFormat::Sarif => sarif::render(&report)?,
    })?;
    Ok(report.verdict)
}

async fn read(connected: &Connected) -> anyhow::Result<Report> {
    let Connected { client, instance, namespace } = connected;
    let mut snapshot = connected.read(&[namespace.clone()].into()).await?;
    snapshot.look_up(client, snapshot.missing(&snapshot.sources())).await;
    let mut marked: Vec<(Kind, Meta)> = Vec::new();
    for kind in snapshot.scope.kinds.clone() {
        match read_strays(client, &snapshot.scope, kind).await {
            Ok(found) => marked.extend(found.into_iter().map(|meta| (kind, meta))),
            Err(Failure::Forbidden(why)) => {
                snapshot.view.gaps.push(format!("{} without Lockstep's label ({why})", kind.plural()));
            }
            Err(failure) => return Err(failure.into()),
        }
    }
    Ok(audit(&snapshot, &marked, instance.caveat()))
}

fn text(report: &Report, took: Duration) -> String {
    let mut lines = Vec::new();
    if !report.findings.is_empty() {
        let mut table = Table::new(&["RULE", "KIND", "OBJECT", "SOURCE", "FINDING"]);
        for finding in &report.findings {
            let source = if finding.source.is_empty() { "-" } else { &finding.source };
            table.add(&[&finding.rule.name(), &finding.kind, &finding.object, &source, &finding.message]);
        }
        lines.extend(table.lines());
        lines.push(String::new());
    }
    lines.extend(report.not_seen.iter().map(|gap| format!("not seen: {gap}")));
    let drift = report.findings.iter().filter(|finding| finding.rule.is_drift()).count();
    let verdict = match report.verdict {
        AuditVerdict::InStep => "everything is in step".to_owned(),
        AuditVerdict::Drift => format!("DRIFT: {}", counted(drift, "finding")),
        AuditVerdict::CannotTell => "CANNOT TELL: not everything could be seen".to_owned(),
    };
    let (sources, companions) = (report.sources, report.companions);
    lines
        .push(format!("{verdict} ({sources} sources, {companions} companions, {:.1} s)", took.as_secs_f64()));
    lines.join("\n") + "\n"
}
