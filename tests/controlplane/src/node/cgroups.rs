//! The node's cgroups: one in every hierarchy of version 1, or one in the only hierarchy of version 2.

use std::fs;
use std::path::{Path, PathBuf};

use crate::Error;

/// The name of the node's cgroup.
const NAME: &str = "lockstep-node";
/// Where the hierarchies are mounted, on the machine and on the node.
const MOUNTED: &str = "/sys/fs/cgroup";

/// The controllers that the kubelet needs. In version 2, a cgroup has the controllers that its parent delegates.
const CONTROLLERS: [&str; 4] = ["cpu", "cpuset", "memory", "pids"];
const DELEGATED: &str = "/sys/fs/cgroup/cgroup.subtree_control";

/// Mounts the machine's hierarchies on the node, with the node's cgroups as roots.
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

/// It also enables the controllers, because systemd may withdraw those that no cgroup uses.
const MOUNT_2: &str = r"
umount -n -R -l /sys/fs/cgroup
mount -n -t cgroup2 cgroup /sys/fs/cgroup
sed 's/[^ ]*/+&/g' /sys/fs/cgroup/cgroup.controllers > /sys/fs/cgroup/cgroup.subtree_control
";

/// Repeats the removal, because a cgroup is busy until its last process has ended.
const REMOVE: &str = r#"
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

/// They are created by [`create`](Self::create), and removed by the script of [`removal_script`](Self::removal_script).
pub(crate) struct Cgroups {
    all: Vec<Cgroup>,
    /// Controllers that the root cgroup did not delegate before. Only in version 2.
    missing: Vec<&'static str>,
}

struct Cgroup {
    /// The hierarchies as the kernel lists them. Only in version 1.
    controllers: Vec<String>,
    /// The root of the hierarchy as the node sees it.
    root: PathBuf,
    /// The cgroup of the processes. In version 2, a cgroup that delegates controllers cannot have processes.
    leaf: PathBuf,
}

/// Why the cgroups cannot be created, if so.
pub(crate) fn unmet_requirement() -> Option<String> {
    if !unified() {
        let counted = Path::new(MOUNTED).join("memory").is_dir();
        return (!counted).then(|| format!("there are no cgroups that count memory at {MOUNTED}"));
    }
    let lacking = absent(&Path::new(MOUNTED).join("cgroup.controllers"));
    if !lacking.is_empty() {
        return Some(format!("the cgroups lack the controllers {}", lacking.join(", ")));
    }
    // Only the machine's root cgroup has no type, and can delegate controllers although it has processes.
    let root = !Path::new(MOUNTED).join("cgroup.type").exists();
    let ready = root || absent(Path::new(DELEGATED)).is_empty();
    (!ready).then(|| format!("{DELEGATED} lacks controllers: is this a container?"))
}

impl Cgroups {
    /// In version 1, below the cgroups of this process. In version 2, below the root: the cgroup of this process has
    /// processes and so delegates nothing.
    pub(crate) fn find() -> Result<Self, Error> {
        if unified() {
            let root = Path::new(MOUNTED).join(NAME);
            let leaf = root.join("programs");
            let all = vec![Cgroup { controllers: Vec::new(), root, leaf }];
            return Ok(Self { all, missing: absent(Path::new(DELEGATED)) });
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

    pub(crate) fn create(&self) -> Result<(), Error> {
        for controller in &self.missing {
            fs::write(DELEGATED, format!("+{controller}")).map_err(Error::at(Path::new(DELEGATED)))?;
        }
        for cgroup in &self.all {
            fs::create_dir_all(&cgroup.leaf).map_err(Error::at(&cgroup.leaf))?;
            if cgroup.controllers.iter().any(|one| one == "cpuset") {
                // No process can run in a cpuset without these.
                for name in ["cpuset.cpus", "cpuset.mems"] {
                    let (from, to) = (cgroup.root.with_file_name(name), cgroup.root.join(name));
                    let value = fs::read(&from).map_err(Error::at(&from))?;
                    fs::write(&to, value).map_err(Error::at(&to))?;
                }
            }
        }
        Ok(())
    }

    /// A script that moves a shell to the root of the node's cgroup namespace.
    pub(crate) fn join_root(&self) -> String {
        join(self.all.iter().map(|cgroup| &cgroup.root))
    }

    /// A script that moves a shell to the cgroup of the node's processes.
    pub(crate) fn join_leaf(&self) -> String {
        join(self.all.iter().map(|cgroup| &cgroup.leaf))
    }

    /// A script for the first process of the node.
    pub(crate) fn mount(&self) -> &'static str {
        if unified() { MOUNT_2 } else { MOUNT_1 }
    }

    /// A script that removes the cgroups after their processes were killed.
    pub(crate) fn removal_script(&self) -> String {
        // Names of the system's cgroups contain no blanks.
        let roots: Vec<_> = self.all.iter().map(|cgroup| cgroup.root.display().to_string()).collect();
        format!("cgroups='{}'\ncontrollers='{}'\n{REMOVE}", roots.join(" "), self.missing.join(" "))
    }

    /// The peak of a container's memory, and its limit, in bytes.
    pub(crate) fn memory(&self, container: &str) -> Result<(u64, u64), Error> {
        let counts = |cgroup: &&Cgroup| unified() || cgroup.controllers.iter().any(|one| one == "memory");
        let dir = self.all.iter().find(counts).and_then(|cgroup| find_dir(&cgroup.root, container));
        let dir = dir.ok_or_else(|| Error::NoContainer(container.to_owned()))?;
        let read = |names: &[&str]| {
            let path = names.iter().map(|name| dir.join(name)).find(|path| path.exists()).unwrap_or_default();
            let text = fs::read_to_string(&path).map_err(Error::at(&path))?;
            Ok::<u64, Error>(text.trim().parse().unwrap_or(u64::MAX))
        };
        // Before Linux 5.19, version 2 has no peak: then this is the current memory.
        let most = read(&["memory.max_usage_in_bytes", "memory.peak", "memory.current"])?;
        Ok((most, read(&["memory.limit_in_bytes", "memory.max"])?))
    }
}

/// Whether the machine uses cgroups version 2.
fn unified() -> bool {
    Path::new(MOUNTED).join("cgroup.controllers").exists()
}

/// The controllers that a file does not list.
fn absent(list: &Path) -> Vec<&'static str> {
    let listed = fs::read_to_string(list).unwrap_or_default();
    CONTROLLERS.into_iter().filter(|name| !listed.split_whitespace().any(|one| one == *name)).collect()
}

fn join<'a>(cgroups: impl Iterator<Item = &'a PathBuf>) -> String {
    cgroups.map(|dir| format!("echo $$ > '{}/cgroup.procs' || exit 1\n", dir.display())).collect()
}

/// Finds a directory of this name.
fn find_dir(dir: &Path, name: &str) -> Option<PathBuf> {
    let dirs = fs::read_dir(dir).ok()?.filter_map(Result::ok).map(|entry| entry.path());
    dirs.filter(|path| path.is_dir()).find_map(|path| {
        if path.file_name().is_some_and(|found| found == name) { Some(path) } else { find_dir(&path, name) }
    })
}
