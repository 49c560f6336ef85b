//! `controlplane up`, and what there is of it on this machine.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// In a process group of its own, like a job of an interactive shell. It ends with the test, whichever way that ends.
pub struct Up(pub Child);

impl Up {
    pub fn start(args: &[&str]) -> Self {
        // Who runs in the background of a script ignores Ctrl+C, and so would whatever they start.
        let mut command = Command::new("env");
        command.args(["--default-signal=INT", env!("CARGO_BIN_EXE_controlplane"), "up"]).args(args);
        command.env_remove("LOCKSTEP_TEST_KUBECONFIG");
        Self(command.stdout(Stdio::piped()).process_group(0).spawn().unwrap())
    }

    /// Waits until it is up, and returns what it prints for a shell.
    pub fn exports(&mut self) -> Vec<String> {
        BufReader::new(self.0.stdout.as_mut().unwrap()).lines().map(Result::unwrap).take(4).collect()
    }

    /// What the name of its data directory begins with.
    fn mark(&self) -> String {
        format!("controlplane-{}-", self.0.id())
    }

    /// Command lines of all processes that mention its data directory, its helpers included.
    pub fn processes(&self) -> Vec<String> {
        let mark = format!("/{}", self.mark());
        processes(|line, _| line.contains(&mark))
    }

    pub fn data_dirs(&self) -> usize {
        let entries = fs::read_dir(std::env::temp_dir()).unwrap().filter_map(Result::ok);
        entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&self.mark())).count()
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Command lines of processes, chosen by these and by where `/proc` describes them.
pub fn processes(choose: impl Fn(&str, &PathBuf) -> bool) -> Vec<String> {
    let proc = fs::read_dir("/proc").unwrap().filter_map(Result::ok).map(|entry| entry.path());
    proc.filter_map(|dir| {
        let line = String::from_utf8_lossy(&fs::read(dir.join("cmdline")).ok()?).replace('\0', " ");
        choose(&line, &dir).then_some(line)
    })
    .collect()
}
