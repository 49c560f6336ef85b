//! The node's cgroups: one in every hierarchy of version 1, or one in the only hierarchy of version 2.

use std::fs;
use std::path::{Path, PathBuf};

use crate::Error;

/// What the node's cgroup is called.
const NAME: &str = "lockstep-node";
/// Where the hierarchies are, on the machine and on the node.
const MOUNTED: &str = "/sys/fs/cgroup";

/// What the kubelet wants to limit. In version 2, a cgroup has the controllers that its parent hands down.
const CONTROLLERS: [&str; 4] = ["cpu", "cpuset", "memory", "pids"];
const HANDED_DOWN: &str = "/sys/fs/cgroup/cgroup.subtree_control";

/// Mounts on the node what the machine has, from the node's cgroups on.
const MOUNT_1: &str = r#"
umount -n -R -l /sys/fs/cgroup
mount -n -t tmpfs -o mode=755 cgroup /sys/fs/cgroup
while IFS=: read -r _ controllers _; do
    case $controllers in ''|name=*) continue;; esac
    mkdir "/sys/fs/cgroup/$controllers"
    mount -n -t cgroup -o "$controllers" cgroup "/sys/fs/cgroup/$controllers"
    for one in $(echo "$controllers" | tr , ' '); do
        [ -e "/sys/fs/cgroup/$one" ] || ln -s "$controllers" "/sys/fs/cgroup/$one"
    done
done < /proc/self/cgroup
"#;

/// Here the controllers are also put to use, since systemd may take back those that no cgroup uses.
const MOUNT_2: &str = r"
umount -n -R -l /sys/fs/cgroup
mount -n -t cgroup2 cgroup /sys/fs/cgroup
sed 's/[^ ]*/+&/g' /sys/fs/cgroup/cgroup.controllers > /sys/fs/cgroup/cgroup.subtree_control
";

/// A cgroup is busy until the last process in it is gone.
const SWEEP: &str = r#"
for cgroup in $cgroups; do
    tries=0
    while [ -d "$cgroup" ] && [ "$tries" -lt 100 ]; do
        find "$cgroup" -depth -type d -exec rmdir {} +
        [ ! -d "$cgroup" ] || sleep 0.1
        tries=$((tries + 1))
    done
done
for controller in $controllers; do
    echo "-$controller" > /sys/fs/cgroup/cgroup.subtree_control
done
"#;

/// They are made by [`make`](Self::make), and removed by what [`sweep`](Self::sweep) returns.
pub(crate) struct Cgroups {
    all: Vec<Cgroup>,
    /// What the machine must hand down for us and did not by itself. Only in version 2.
    missing: Vec<&'static str>,
}

struct Cgroup {
    /// As the kernel lists them. Only in version 1.
    controllers: Vec<String>,
    /// What the node takes for the root of the hierarchy.
    root: PathBuf,
    /// Where processes are put. In version 2, this cannot be where controllers are handed down.
    leaf: PathBuf,
}

/// Why there can be no such cgroups.
pub(crate) fn unmet_requirement() -> Option<String> {
    if !unified() {
        let counted = Path::new(MOUNTED).join("memory").is_dir();
        return (!counted).then(|| format!("there are no cgroups that count memory at {MOUNTED}"));
    }
    let lacking = absent(&Path::new(MOUNTED).join("cgroup.controllers"));
    if !lacking.is_empty() {
        return Some(format!("the cgroups lack the controllers {}", lacking.join(", ")));
    }
    // Only the root of the machine has no type, and can hand down controllers though it has processes.
    let root = !Path::new(MOUNTED).join("cgroup.type").exists();
    let ready = root || absent(Path::new(HANDED_DOWN)).is_empty();
    (!ready).then(|| format!("{HANDED_DOWN} lacks controllers: is this a container?"))
}

impl Cgroups {
    /// In version 1, below those that this process is in. In version 2 these hand down nothing, since they have
    /// processes: there, below the root.
    pub(crate) fn find() -> Result<Self, Error> {
        if unified() {
            let root = Path::new(MOUNTED).join(NAME);
            let leaf = root.join("programs");
            let all = vec![Cgroup { controllers: Vec::new(), root, leaf }];
            return Ok(Self { all, missing: absent(Path::new(HANDED_DOWN)) });
        }
        let own = Path::new("/proc/self/cgroup");
        let text = fs::read_to_string(own).map_err(Error::at(own))?;
        let hierarchies = text.lines().filter_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let (controllers, path) = (parts.next()?, parts.next()?);
            let named = controllers.is_empty() || controllers.starts_with("name=");
            (!named).then(|| {
                let root = Path::new(MOUNTED).join(controllers).join(path.trim_start_matches('/')).join(NAME);
                let controllers = controllers.split(',').map(str::to_owned).collect();
                Cgroup { controllers, leaf: root.clone(), root }
            })
        });
        Ok(Self { all: hierarchies.collect(), missing: Vec::new() })
    }

    pub(crate) fn make(&self) -> Result<(), Error> {
        for controller in &self.missing {
            fs::write(HANDED_DOWN, format!("+{controller}")).map_err(Error::at(Path::new(HANDED_DOWN)))?;
        }
        for cgroup in &self.all {
            fs::create_dir_all(&cgroup.leaf).map_err(Error::at(&cgroup.leaf))?;
            if cgroup.controllers.iter().any(|one| one == "cpuset") {
                // Nothing can run in a cgroup without these.
                for name in ["cpuset.cpus", "cpuset.mems"] {
                    let (from, to) = (cgroup.root.with_file_name(name), cgroup.root.join(name));
                    let value = fs::read(&from).map_err(Error::at(&from))?;
                    fs::write(&to, value).map_err(Error::at(&to))?;
                }
            }
        }
        Ok(())
    }

    /// A script that puts a shell where a cgroup namespace of the node has to begin.
    pub(crate) fn join_root(&self) -> String {
        join(self.all.iter().map(|cgroup| &cgroup.root))
    }

    /// A script that puts a shell among the processes of the node.
    pub(crate) fn join_leaf(&self) -> String {
        join(self.all.iter().map(|cgroup| &cgroup.leaf))
    }

    /// A script for the first process of the node.
    pub(crate) fn mount(&self) -> &'static str {
        if unified() { MOUNT_2 } else { MOUNT_1 }
    }

    /// A script that removes the cgroups when their processes are killed.
    pub(crate) fn sweep(&self) -> String {
        // The system's own cgroups have no blanks in their names.
        let roots: Vec<_> = self.all.iter().map(|cgroup| cgroup.root.display().to_string()).collect();
        format!("cgroups='{}'\ncontrollers='{}'\n{SWEEP}", roots.join(" "), self.missing.join(" "))
    }

    /// The most memory that a container ever had, and its limit, in bytes.
    pub(crate) fn memory(&self, container: &str) -> Result<(u64, u64), Error> {
        let counts = |cgroup: &&Cgroup| unified() || cgroup.controllers.iter().any(|one| one == "memory");
        let dir = self.all.iter().find(counts).and_then(|cgroup| find_dir(&cgroup.root, container));
        let dir = dir.ok_or_else(|| Error::NoContainer(container.to_owned()))?;
        let read = |names: &[&str]| {
            let path = names.iter().map(|name| dir.join(name)).find(|path| path.exists()).unwrap_or_default();
            let text = fs::read_to_string(&path).map_err(Error::at(&path))?;
            Ok::<u64, Error>(text.trim().parse().unwrap_or(u64::MAX))
        };
        // Before Linux 5.19, version 2 keeps no peak: there, it is what the container has now.
        let most = read(&["memory.max_usage_in_bytes", "memory.peak", "memory.current"])?;
        Ok((most, read(&["memory.limit_in_bytes", "memory.max"])?))
    }
}

/// Whether the cgroups are of version 2.
fn unified() -> bool {
    Path::new(MOUNTED).join("cgroup.controllers").exists()
}

/// Those of our controllers that a file does not list.
fn absent(list: &Path) -> Vec<&'static str> {
    let listed = fs::read_to_string(list).unwrap_or_default();
    CONTROLLERS.into_iter().filter(|name| !listed.split_whitespace().any(|one| one == *name)).collect()
}

fn join<'a>(cgroups: impl Iterator<Item = &'a PathBuf>) -> String {
    cgroups.map(|dir| format!("echo $$ > '{}/cgroup.procs' || exit 1\n", dir.display())).collect()
}

/// The directory of this name, wherever it is.
fn find_dir(dir: &Path, name: &str) -> Option<PathBuf> {
    let dirs = fs::read_dir(dir).ok()?.filter_map(Result::ok).map(|entry| entry.path());
    dirs.filter(|path| path.is_dir()).find_map(|path| {
        if path.file_name().is_some_and(|found| found == name) { Some(path) } else { find_dir(&path, name) }
    })
}
