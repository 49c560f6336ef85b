//! What shells and `man` need, made from the definition of the command line.

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use lockstep::cli::Cli;

/// The definition of the command line.
pub fn command() -> Command {
    Cli::command()
}

/// The completion scripts: where each belongs in an archive, and its text.
pub fn completions() -> Vec<(String, Vec<u8>)> {
    let scripts = [(Shell::Bash, "lockstep.bash"), (Shell::Zsh, "_lockstep"), (Shell::Fish, "lockstep.fish")];
    let completion = |(shell, name)| {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut command(), "lockstep", &mut script);
        (format!("completions/{name}"), script)
    };
    scripts.into_iter().map(completion).collect()
}

/// A man page for each command, dated as the release.
pub fn man_pages(created: &str) -> anyhow::Result<Vec<(String, Vec<u8>)>> {
    let mut command = command().disable_help_subcommand(true);
    command.build();
    let mut pages = Vec::new();
    add_pages(&command, created.split('T').next().unwrap_or_default(), &mut pages)?;
    Ok(pages)
}

fn add_pages(command: &Command, date: &str, pages: &mut Vec<(String, Vec<u8>)>) -> anyhow::Result<()> {
    let page = clap_mangen::Man::new(command.clone()).date(date);
    let mut text = Vec::new();
    page.render(&mut text)?;
    pages.push((format!("man/{}", page.get_filename()), text));
    for subcommand in command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set()) {
        add_pages(subcommand, date, pages)?;
    }
    Ok(())
}
