//! Runs `controlplane up`, and finds its processes and files.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// `controlplane up` in a process group of its own, like a job of an interactive shell. Dropping it kills it.
pub struct Up(pub Child);

impl Up {
    /// `args` may begin with variables, like `KUBEBUILDER_ASSETS=/bin`.
    pub fn start(args: &[&str]) -> Self {
        let variables = args.iter().take_while(|arg| arg.contains('=')).count();
        // A background job of a script ignores SIGINT, and its children inherit that.
        let mut command = Command::new("env");
        command.arg("--default-signal=INT").args(&args[..variables]);
        command.args([env!("CARGO_BIN_EXE_controlplane"), "up"]).args(&args[variables..]);
        command.env_remove("LOCKSTEP_TEST_KUBECONFIG");
        Self(command.stdout(Stdio::piped()).process_group(0).spawn().unwrap())
    }

    /// Waits until it is up, and returns the `export` lines that it prints.
    pub fn exports(&mut self) -> Vec<String> {
        BufReader::new(self.0.stdout.as_mut().unwrap()).lines().map(Result::unwrap).take(4).collect()
    }

    /// The prefix of its data directory's name.
    fn data_dir_prefix(&self) -> String {
        format!("controlplane-{}-", self.0.id())
    }

    /// Command lines of all processes that mention its data directory.
    pub fn processes(&self) -> Vec<String> {
        let prefix = format!("/{}", self.data_dir_prefix());
        processes(|line, _| line.contains(&prefix))
    }

    pub fn data_dirs(&self) -> usize {
        let entries = fs::read_dir(std::env::temp_dir()).unwrap().filter_map(Result::ok);
        entries
            .filter(|entry| entry.file_name().to_string_lossy().starts_with(&self.data_dir_prefix()))
            .count()
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Command lines of the processes for which `choose` holds, given the command line and the directory in `/proc`.
pub fn processes(choose: impl Fn(&str, &PathBuf) -> bool) -> Vec<String> {
    let proc = fs::read_dir("/proc").unwrap().filter_map(Result::ok).map(|entry| entry.path());
    proc.filter_map(|dir| {
        let line = String::from_utf8_lossy(&fs::read(dir.join("cmdline")).ok()?).replace('\0', " ");
        choose(&line, &dir).then_some(line)
    })
    .collect()
}
