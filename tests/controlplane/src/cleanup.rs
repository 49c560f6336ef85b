//! Cleans up after this process, whichever way it ends: return, panic, Ctrl+C or SIGKILL.
//!
//! Two small shells do it, without a list of processes that could be outdated:
//!
//! - The **group leader** leads a process group that every process of the control plane joins. While it lives, the id
//!   of the group is not reused.
//! - The **cleaner** reads a pipe whose only writer is this process. At its end, which the kernel causes when this
//!   process ends, it kills the whole group, runs a script in the data directory (see [`SCRIPT`]) and removes the
//!   directory.
//!
//! No process can escape between its start and joining the group: a child joins before it executes its program, and
//! until then holds a copy of the pipe (close-on-exec). When the cleaner sees the end of the pipe, every child is in
//! the group.

use std::fs::File;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::Error;

const SHELL: &str = "sh";

/// A script in the data directory that the cleaner runs after killing the group and before removing the directory.
pub(crate) const SCRIPT: &str = "cleanup.sh";

/// Forwards the line that says the cleaner is ready, then waits for the cleaner to end.
const GROUP_LEADER: &str = r#"read -r ready && echo "$ready" && read -r never"#;

/// `$1` is the data directory, `$2` the group. The cleaner creates the directory itself, so that there is no moment in
/// which nobody would remove it. `rm` is repeated because killed processes may still finish their last write.
const CLEANER: &str = r#"
trap '' HUP INT TERM
mkdir -m 700 "$1" || exit 1
echo ready
while read -r _; do :; done
kill -KILL "-$2" 2>/dev/null
[ ! -e "$1/cleanup.sh" ] || sh "$1/cleanup.sh" 2>/dev/null
tries=0
until rm -rf "$1" 2>/dev/null || [ "$tries" -ge 100 ]; do
    tries=$((tries + 1))
    sleep 0.1
done
"#;

/// The two shells, and the data directory that they remove.
///
/// Dropping it kills the rest of the group, removes the directory, and returns when that is done. If it is leaked, as
/// in a `static`, the same happens at the end of the process.
pub(crate) struct Cleanup {
    dir: PathBuf,
    leader: Child,
    cleaner: Child,
}

impl Cleanup {
    /// Creates `dir`, which must not exist, with access for the owner only.
    pub(crate) fn start(dir: PathBuf) -> Result<Self, Error> {
        Self::start_with(dir, Stdio::null())
    }

    /// As [`start`](Self::start), with a locked file that is unlocked after the cleanup.
    pub(crate) fn start_locked(dir: PathBuf, lock: File) -> Result<Self, Error> {
        Self::start_with(dir, lock.into())
    }

    /// `held` becomes the standard error of the cleaner, and stays open until the cleaner ends.
    fn start_with(dir: PathBuf, held: Stdio) -> Result<Self, Error> {
        let mut leader = shell(GROUP_LEADER, "controlplane-group-leader")
            .arg(&dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(Error::at(Path::new(SHELL)))?;
        let (leader_in, leader_out) = (leader.stdin.take(), leader.stdout.take());
        let cleaner = shell(CLEANER, "controlplane-cleaner")
            .arg(&dir)
            .arg(leader.id().to_string())
            .stdin(Stdio::piped())
            .stdout(leader_in.map_or_else(Stdio::null, Stdio::from))
            .stderr(held)
            .spawn()
            .map_err(Error::at(Path::new(SHELL)))?;
        let cleanup = Self { dir, leader, cleaner };

        let mut ready = String::new();
        if let Some(mut out) = leader_out {
            let mut byte = [0];
            while out.read(&mut byte)? == 1 && byte != *b"\n" {
                ready.push(char::from(byte[0]));
            }
        }
        if ready == "ready" { Ok(cleanup) } else { Err(Error::Cleanup(cleanup.dir.clone())) }
    }

    /// The data directory.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The process group that every process of the control plane joins.
    pub(crate) fn group(&self) -> u32 {
        self.leader.id()
    }
}

impl Drop for Cleanup {
    fn drop(&mut self) {
        drop(self.cleaner.stdin.take());
        // `drop` cannot report an error; both children end by themselves.
        let _ = self.cleaner.wait();
        let _ = self.leader.wait();
    }
}

/// A shell in a process group of its own, so that Ctrl+C in a terminal does not reach it.
fn shell(script: &str, name: &str) -> Command {
    let mut command = Command::new(SHELL);
    command.args(["-c", script, name]).current_dir("/").stderr(Stdio::null()).process_group(0);
    command
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn directory(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("cleanup-{name}-{}", std::process::id()))
    }

    #[test]
    fn directory_is_private_and_removed_on_drop() {
        let cleanup = Cleanup::start(directory("private")).unwrap();
        let dir = cleanup.dir().to_owned();
        assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
        fs::write(dir.join("file"), "content").unwrap();
        drop(cleanup);
        assert!(!dir.exists());
    }

    #[test]
    fn existing_directory_is_an_error_and_is_not_removed() {
        let dir = directory("foreign");
        fs::create_dir(&dir).unwrap();
        assert!(matches!(Cleanup::start(dir.clone()), Err(Error::Cleanup(_))));
        assert!(dir.exists());
        fs::remove_dir(dir).unwrap();
    }

    #[test]
    fn paused_process_of_the_group_is_killed() {
        let cleanup = Cleanup::start(directory("group")).unwrap();
        let group = i32::try_from(cleanup.group()).unwrap();
        let mut child =
            Command::new("sh").args(["-c", "kill -STOP $$"]).process_group(group).spawn().unwrap();
        drop(cleanup);
        assert!(!child.wait().unwrap().success());
    }

    #[test]
    fn script_runs_before_the_lock_is_released() {
        let (dir, path) = (directory("script"), directory("lock"));
        let lock = File::create(&path).unwrap();
        lock.lock().unwrap();
        let cleanup = Cleanup::start_locked(dir.clone(), lock).unwrap();
        let other = File::open(&path).unwrap();
        assert!(other.try_lock().is_err());
        let script = format!("rm '{}'", path.display());
        fs::write(dir.join(SCRIPT), script).unwrap();
        drop(cleanup);
        other.try_lock().unwrap();
        assert!(!path.exists() && !dir.exists());
    }
}
