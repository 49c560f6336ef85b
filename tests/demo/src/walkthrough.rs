//! The walk-through of the README: its commands, and what each has to print.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::Demo;
use crate::picture::{Entry, without_age};

/// How long a read is repeated until it prints what it should.
const READ_TIMEOUT: Duration = Duration::from_secs(5);

/// One command.
pub struct Step {
    pub command: &'static str,
    pub expect: Expect,
    /// Whether the README's picture shows it.
    pub pictured: bool,
}

/// What a step must print.
pub enum Expect {
    /// Exactly this output.
    Is(&'static str),
    /// An output that contains each of these.
    Has(&'static [&'static str]),
    /// An output that contains the first and not the second.
    HasNot(&'static str, &'static str),
}

pub fn steps() -> Vec<Step> {
    use Expect::{Has, HasNot, Is};
    let step = |command, expect| Step { command, expect, pictured: true };
    let unpictured = |command, expect| Step { command, expect, pictured: false };
    vec![
        step("kubectl create configmap colors --from-literal=sky=blue", Is("configmap/colors created")),
        step("kubectl label configmap colors workshop.io/managed=true", Is("configmap/colors labeled")),
        step(r#"kubectl get configmap colors-synced -o jsonpath='{.data}{"\n"}'"#, Is(r#"{"sky":"blue"}"#)),
        step(
            r#"kubectl patch configmap colors --type merge -p '{"data":{"sky":"orange"}}'"#,
            Is("configmap/colors patched"),
        ),
        step(r#"kubectl get configmap colors-synced -o jsonpath='{.data}{"\n"}'"#, Is(r#"{"sky":"orange"}"#)),
        step(
            r#"kubectl patch configmap colors-synced --type merge -p '{"data":{"sky":"green"}}'"#,
            Has(&["(Forbidden)", "Change the source instead: kubectl edit configmap colors -n default"]),
        ),
        step(
            "kubectl delete configmap colors-synced",
            Has(&["Warning: default/colors-synced is a companion", r#"configmap "colors-synced" deleted"#]),
        ),
        step(r#"kubectl get configmap colors-synced -o jsonpath='{.data}{"\n"}'"#, Is(r#"{"sky":"orange"}"#)),
        step(
            "kubectl annotate --overwrite configmap colors workshop.io/target-namespaces='team-*'",
            Has(&["configmap/colors annotated", "Warning: `team-*` matches no namespace"]),
        ),
        step("kubectl create namespace team-a", Is("namespace/team-a created")),
        step(
            "kubectl get configmap -A -l workshop.io/companion=true",
            HasNot("team-a      colors-synced", "default"),
        ),
        unpictured(
            "kubectl describe configmap colors",
            Has(&["created 1: default/colors-synced", "healed 1: default/colors-synced (deleted)"]),
        ),
        unpictured("kubectl delete configmap colors", Has(&[r#"configmap "colors" deleted"#])),
        unpictured("kubectl get configmap -A -l workshop.io/companion=true", Is("No resources found")),
    ]
}

/// Runs every step, prints its output, and returns what the picture shows. A read is repeated until it prints what it
/// should.
pub async fn play(demo: &Demo) -> Result<Vec<Entry>> {
    let mut session = Vec::new();
    for step in steps() {
        let reads = step.command.starts_with("kubectl get") || step.command.starts_with("kubectl describe");
        let start = Instant::now();
        let output = loop {
            let output = demo.shell(step.command).await?;
            if !reads || step.expect.holds(&output) || start.elapsed() > READ_TIMEOUT {
                break output;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        println!("$ {}\n{output}", step.command);
        if !step.expect.holds(&output) {
            bail!("`{}` should have printed {}", step.command, step.expect);
        }
        if step.pictured {
            session.push(Entry { command: step.command.to_owned(), output: without_age(&output) });
        }
    }
    Ok(session)
}

impl Expect {
    pub fn holds(&self, output: &str) -> bool {
        match self {
            Self::Is(text) => output == *text,
            Self::Has(texts) => texts.iter().all(|text| output.contains(text)),
            Self::HasNot(text, other) => output.contains(text) && !output.contains(other),
        }
    }
}

impl std::fmt::Display for Expect {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Is(text) => write!(f, "`{text}`"),
            Self::Has(texts) => write!(f, "`{}`", texts.join("` and `")),
            Self::HasNot(text, other) => write!(f, "`{text}` and not `{other}`"),
        }
    }
}
