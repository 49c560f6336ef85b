//! `controlplane build` compiles the binaries, `controlplane versions` lists the minor versions of Kubernetes that it can
//! compile. `controlplane prepare` finds those for tests or demo, or compiles them,
//! while a command runs. `controlplane up` runs a control plane, optionally with a node, until it is killed. `controlplane
//! preflight` fails and prints the reason if this machine cannot run a node. `controlplane image` writes an image archive.

#![forbid(unsafe_code)]

use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::{env, thread};

use controlplane::{Binaries, ControlPlane, Error, Image, Node, Purpose};

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let done = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["build"] => show(Binaries::build()),
        ["build", "node"] => show(Binaries::build_node()),
        ["build", "etcd-tools"] => show(Binaries::build_etcd_tools()),
        ["build", "helm"] => show(Binaries::build_helm()),
        ["build", "helm3"] => show(Binaries::build_helm3()),
        ["build", "flux"] => show(Binaries::build_flux()),
        ["build", "argocd"] => show(Binaries::build_argocd()),
        ["build", "cert-manager"] => show(Binaries::build_cert_manager()),
        ["build", version] => show(Binaries::build_version(version)),
        ["versions"] => controlplane::versions()
            .try_for_each(|version| writeln!(io::stdout(), "{version}"))
            .map_err(Error::from),
        ["prepare", "tests", program, ref arguments @ ..] => prepare(Purpose::Tests, program, arguments),
        ["prepare", "demo", program, ref arguments @ ..] => prepare(Purpose::Demo, program, arguments),
        ["up"] => ControlPlane::start().and_then(|plane| wait_for_signal(&plane)),
        ["up", "demo"] => ControlPlane::start_for_demo().and_then(|plane| wait_for_signal(&plane)),
        ["up", "node", ref images @ ..] => {
            let images: Vec<&Path> = images.iter().map(Path::new).collect();
            Node::start(&images).and_then(|node| wait_for_signal(node.plane()))
        }
        ["preflight"] => match Node::unmet_requirement() {
            Some(reason) => {
                println!("{reason}");
                return ExitCode::FAILURE;
            }
            None => Ok(()),
        },
        ["image", binary, archive, name] => image(Path::new(binary), Path::new(archive), name),
        _ => {
            eprintln!(
                "usage: controlplane build [1.30 | … | node | helm | helm3 | flux | argocd | cert-manager] | versions | \
                 prepare tests|demo COMMAND… | up [demo | node [ARCHIVE…]] | preflight | image BINARY ARCHIVE NAME"
            );
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("controlplane: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Prints the directory of the binaries.
fn show(built: Result<Binaries, Error>) -> Result<(), Error> {
    writeln!(io::stdout(), "{}", built?.dir().display())?;
    Ok(())
}

/// Finds the binaries or compiles them, while a command runs.
fn prepare(purpose: Purpose, program: &str, arguments: &[&str]) -> Result<(), Error> {
    let mut command = Command::new(program);
    command.args(arguments);
    Binaries::find_beside(purpose, command).map(drop)
}

/// Writes an image of Lockstep with this static binary.
fn image(binary: &Path, archive: &Path, name: &str) -> Result<(), Error> {
    Image::lockstep(binary, name)?.write(archive)?;
    writeln!(io::stdout(), "{}", archive.display())?;
    Ok(())
}

/// Prints how to reach the control plane, and waits for a signal. No handler is needed: when this process ends, the
/// control plane ends with it.
fn wait_for_signal(plane: &ControlPlane) -> Result<(), Error> {
    let mut out = io::stdout();
    writeln!(out, "export KUBECONFIG='{}'", plane.admin().display())?;
    for (name, value) in plane.kubectl().get_envs() {
        writeln!(out, "export {}='{}'", name.display(), value.unwrap_or_default().display())?;
    }
    if let Some(dir) = plane.kubectl_path().parent() {
        writeln!(out, "export PATH='{}':\"$PATH\"", dir.display())?;
    }
    eprintln!("controlplane: {} is up; Ctrl+C stops it", plane.server_url());
    loop {
        thread::park();
    }
}
