//! The commands of docs/recipes.md, in their order, print what the page says.

use crate::{
    harness::{Cluster, dedicated_control_plane, eventually},
    users::User,
};

const RECIPES: &str = include_str!("../../docs/recipes.md");

/// A command, and the output that follows it on the page.
pub struct Step {
    pub command: String,
    pub output: String,
}

pub fn steps(page: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    // Every other part of the page is a block of commands.
    for line in page.split("```").skip(1).step_by(2).flat_map(str::lines) {
        match (line.strip_prefix("$ "), steps.last_mut()) {
            (Some(command), _) => steps.push(Step { command: command.to_owned(), output: String::new() }),
            (None, Some(step)) => step.output += &format!("{line}\n"),
            (None, None) => {}
        }
    }
    steps
}

/// What a command prints on a terminal: kubectl writes warnings before its result. Spaces at the end of a line, which
/// kubectl prints to fill a column, do not count.
pub fn printed(user: &User, command: &str) -> String {
    let output = user.shell(command);
    let text =
        [output.stderr, output.stdout].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    text.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

#[tokio::test]
async fn every_command_prints_what_the_page_says() {
    let Some(plane) = dedicated_control_plane("recipes", &[]) else { return };
    let cluster = Cluster::on(plane, "recipes").await.with_domain("workshop.io");
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    let (admin, steps) = (cluster.admin(), steps(RECIPES));
    assert!(steps.len() > 25, "{} commands: has the format of the page changed?", steps.len());
    for Step { command, output } in steps {
        let output = output.trim_end();
        if command.starts_with("kubectl get") {
            // Lockstep is faster than a reader, but not than this test.
            eventually(&format!("`{command}` prints\n{output}\n"), || async {
                (printed(&admin, &command).trim_end() == output).then_some(())
            })
            .await;
        } else {
            assert_eq!(printed(&admin, &command).trim_end(), output, "{command}");
        }
    }
}
