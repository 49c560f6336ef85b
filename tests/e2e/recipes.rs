//! The commands of docs/recipes.md and of the README, in their order, print what the page says.

use std::{fs, path::Path};

use crate::{
    harness::{Cluster, dedicated_control_plane, eventually},
    users::User,
};

const RECIPES: &str = include_str!("../../docs/recipes.md");
const README: &str = include_str!("../../README.md");

/// Users that the recipes name as deputies.
const DEPUTIES: &str = "--deputy-user=system:serviceaccount:argocd:argocd-application-controller,\
                        system:serviceaccount:flux-system:kustomize-controller,\
                        system:serviceaccount:cert-manager:cert-manager";

/// Commands that change nothing. Lockstep is faster than a reader, but not than a test, so they are repeated until they
/// print what the page says.
const READS: [&str; 3] = ["kubectl get", "kubectl events", "lockstep"];

/// A command, and the output that follows it on the page.
pub struct Step {
    pub command: String,
    pub output: String,
}

/// The commands in blocks of a page. Lines before the first command of a block, and blocks of YAML, are for people
/// only.
pub fn steps(page: &str) -> Vec<Step> {
    let mut steps = Vec::new();
    for block in blocks(page).filter(|block| block.starts_with('\n')) {
        let mut current: Option<Step> = None;
        for line in block.lines().skip(1) {
            match (line.strip_prefix("$ "), &mut current) {
                (Some(command), _) => {
                    let step = Step { command: command.to_owned(), output: String::new() };
                    steps.extend(current.replace(step));
                }
                (None, Some(step)) => step.output += &format!("{line}\n"),
                (None, None) => {}
            }
        }
        steps.extend(current);
    }
    steps
}

/// The manifests of a page that commands use: blocks of YAML whose first line is a comment with the name of the file.
fn files(page: &str) -> impl Iterator<Item = (&str, &str)> {
    let manifests = blocks(page).filter_map(|block| block.strip_prefix("yaml\n# "));
    manifests.filter_map(|block| block.split_once('\n')).filter(|(name, _)| name.ends_with(".yaml"))
}

fn blocks(page: &str) -> impl Iterator<Item = &str> {
    page.split("```").skip(1).step_by(2)
}

/// What a command prints on a terminal: kubectl writes warnings before its result. Spaces at the end of a line, which
/// kubectl prints to fill a column, do not count.
pub fn printed(user: &User, command: &str) -> String {
    let output = user.shell(command);
    let text =
        [output.stderr, output.stdout].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    text.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

/// A text without what differs from run to run: times, the name of the leader, the spaces that align columns, and the
/// namespace that only kubectl from 1.34 on names when it deletes something.
fn comparable(text: &str) -> String {
    let mut lines = Vec::new();
    for line in text.trim_end().lines() {
        let line = match line.split_once("\" deleted from ") {
            Some((object, rest)) if rest.ends_with(" namespace") => {
                &line[..object.len() + "\" deleted".len()]
            }
            _ => line,
        };
        let mut words: Vec<&str> =
            line.split_whitespace().map(|word| if is_time(word) { "TIME" } else { word }).collect();
        if let Some(at) = words.iter().position(|word| *word == "leader").filter(|at| at + 1 < words.len()) {
            words[at + 1] = "NAME";
        }
        lines.push(words.join(" "));
    }
    lines.join("\n")
}

/// An age such as `3s`, `5m`, `2h`, `7d`, or seconds such as `0.1`.
fn is_time(word: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    word.strip_suffix(['s', 'm', 'h', 'd']).is_some_and(is_number)
        || word.split_once('.').is_some_and(|(whole, part)| is_number(whole) && is_number(part))
}

/// Runs the commands of a page as a cluster's admin, in a directory that has its manifests.
async fn run_page(test: &str, page: &str, at_least: usize) {
    let Some(plane) = dedicated_control_plane(&[]) else { return };
    let cluster = Cluster::on(plane, test).await.with_domain("workshop.io");
    let (_installed, _lockstep) = cluster.install_and_start(&[DEPUTIES]).await;
    let (admin, steps) = (cluster.admin(), steps(page));
    assert!(steps.len() >= at_least, "{} commands: has the format of the page changed?", steps.len());
    let directory = plane.data_dir().join("page");
    write_files(&directory, page);
    for Step { command, output } in steps {
        let line = format!("cd '{}' && {command}", directory.display());
        let expected = comparable(&output);
        if READS.iter().any(|read| command.starts_with(read)) {
            eventually(&format!("`{command}` prints\n{output}"), || async {
                (comparable(&printed(&admin, &line)) == expected).then_some(())
            })
            .await;
        } else {
            assert_eq!(comparable(&printed(&admin, &line)), expected, "{command}");
        }
    }
}

fn write_files(directory: &Path, page: &str) {
    fs::create_dir_all(directory).expect("a directory");
    for (name, manifest) in files(page) {
        fs::write(directory.join(name), manifest).expect("a file");
    }
}

#[tokio::test]
async fn every_command_prints_what_the_page_says() {
    run_page("recipes", RECIPES, 45).await;
}

#[tokio::test]
async fn every_command_of_the_readme_prints_what_it_says() {
    run_page("readme", README, 10).await;
}
