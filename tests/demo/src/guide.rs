//! What `make run` prints when it is up: how to reach the control plane, and what to look at.

use std::path::Path;

use crate::walkthrough;

/// What shows how Lockstep is doing, and why to look at it.
pub const LOOK: [(&str, &str); 2] = [
    ("lockstep status -A", "every source, its targets, and whether they are in step"),
    ("lockstep ui", "the same as a live page in the browser"),
];

/// The text. `path` has the directories of `lockstep` and `kubectl`.
pub fn text(kubeconfig: &Path, path: &[&Path]) -> String {
    let path: Vec<String> = path.iter().map(|dir| format!("'{}'", dir.display())).collect();
    let commands: String = walkthrough::steps().iter().map(|step| format!("  {}\n", step.command)).collect();
    let look: String = LOOK.iter().map(|(command, why)| format!("  {command:20} # {why}\n")).collect();
    format!(
        "
Lockstep is up on a Kubernetes control plane of its own. Paste this into another terminal:

  export KUBECONFIG='{}'
  export PATH={}:\"$PATH\"

then try one after the other:

{commands}
and look at any time:

{look}
Ctrl+C stops everything. What Lockstep logs follows.
",
        kubeconfig.display(),
        path.join(":"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> String {
        text(
            Path::new("/tmp/plane/admin.kubeconfig"),
            &[Path::new("/src/target/debug"), Path::new("/cache/bin")],
        )
    }

    #[test]
    fn guide_names_every_command_of_the_walkthrough_and_what_to_look_at() {
        let text = example();
        for command in
            walkthrough::steps().iter().map(|step| step.command).chain(["lockstep status", "lockstep ui"])
        {
            assert!(text.lines().any(|line| line.trim_start().starts_with(command)), "{command}: {text}");
        }
        assert!(text.contains("Ctrl+C stops everything"), "{text}");
    }

    #[test]
    fn guide_can_be_pasted_and_fits_on_a_screen() {
        let text = example();
        assert!(text.contains("\n  export KUBECONFIG='/tmp/plane/admin.kubeconfig'\n"), "{text}");
        assert!(text.contains("\n  export PATH='/src/target/debug':'/cache/bin':\"$PATH\"\n"), "{text}");
        assert!(text.lines().count() <= 32, "{} lines", text.lines().count());
        assert!(text.lines().all(|line| line.len() <= 100), "{text}");
    }
}
