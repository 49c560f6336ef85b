//! A release is installed on a real node as its `install.yaml` says, from the image in its archive, and with its chart.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use controlplane::{Binaries, Node, skip};
use serde_json::json;

use crate::{
    harness::{Cluster, pipe, run},
    installation::{Installation, NAMESPACE},
    report,
};

/// Run by `make test-dist`, which says where the release is.
#[tokio::test(flavor = "multi_thread")]
async fn release_on_a_real_node_is_installed_as_its_instructions_say() {
    let Some(dist) = env::var_os("LOCKSTEP_TEST_DIST") else {
        return skip("LOCKSTEP_TEST_DIST is not set: run `make test-dist`");
    };
    let dist = Path::new(env!("CARGO_MANIFEST_DIR")).join(dist);
    if let Some(reason) = Node::unmet_requirement() {
        return skip(&reason);
    }
    let node = Node::start(&[&file(&dist, "image-linux-", ".tar")]).unwrap_or_else(|error| panic!("{error}"));
    // Leaked: it is cleaned up at the end of the process.
    let plane = Box::leak(Box::new(node)).plane();
    let kubectl = |line: &str| run(plane.kubectl().args(line.split(' ')).current_dir(&dist));

    let manifests = fs::read_to_string(dist.join("install.yaml")).expect("install.yaml");
    let instructions: Vec<&str> =
        manifests.lines().filter_map(|line| line.strip_prefix("#   kubectl ")).collect();
    let [create, apply, wait, delete] = instructions[..] else { panic!("{instructions:?}") };
    for line in [create, apply, wait] {
        kubectl(line);
    }
    report("install.yaml is applied, and the replicas run");
    let cluster = Cluster::on(plane, "release").await;
    let installation = Installation { plane, cluster, flags: vec![] };
    assert_eq!(installation.pods().await.len(), 2);
    installation.wait_webhook("default").await;
    let namespace = installation.cluster.namespace("released").await;
    let took = installation.time_create_and_heal(&namespace, "config").await;
    report(&format!("a companion is created in {:.1?}, and healed in {:.1?}", took[0], took[1]));

    // `docker run IMAGE manifests …` runs the entrypoint with other arguments, and so does a pod.
    let docker = manifests.lines().find_map(|line| line.strip_prefix("#   docker run --rm ")).expect("it");
    let (image, arguments) =
        docker.trim_end_matches(" | kubectl apply -f -").split_once(' ').expect("arguments");
    kubectl(&format!("run printer --image={image} --image-pull-policy=Never --restart=Never -- {arguments}"));
    kubectl("wait pod/printer --for=jsonpath={.status.phase}=Succeeded --timeout=60s");
    let printed = kubectl("logs printer");
    let binary = unpacked(&dist);
    assert_eq!(printed, run(Command::new(&binary.0).args(arguments.split(' '))));
    pipe(plane.kubectl().args(["apply", "-f", "-"]), &printed);
    kubectl(wait);
    report("what the image prints is applied over it, for Secrets too");
    let secrets = format!("/api/v1/namespaces/{namespace}/secrets");
    let source = json!({
        "metadata": {"name": "token", "labels": {"workshop.io/managed": "true"}}, "stringData": {"a": "b"},
    });
    installation.wait_webhook("default").await;
    installation.cluster.post(&secrets, &source).await;
    kubectl(&format!("wait secret/token-synced -n {namespace} --for=create --timeout=60s"));
    let checked = run(Command::new(&binary.0).arg("check").env("KUBECONFIG", plane.admin()));
    report(&format!("lockstep check of the release:\n{checked}"));

    kubectl(delete);
    kubectl(&format!("get namespace {NAMESPACE}"));
    report("install.yaml is deleted; the namespace is there");

    for (helm, binaries) in [("Helm 3", Binaries::build_helm3()), ("Helm 4", Binaries::build_helm())] {
        let program = binaries.unwrap_or_else(|error| panic!("{error}")).dir().join("helm");
        let helm_in_namespace = |line: &str| {
            let mut command = Command::new(&program);
            command.env("KUBECONFIG", plane.admin()).current_dir(&dist);
            // Without the user's own configuration.
            for variable in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
                command.env(variable, binary.0.with_file_name("helm-home"));
            }
            run(command.args(line.split(' ')).args(["--namespace", NAMESPACE, "--timeout", "120s"]))
        };
        let chart = file_named(&dist, |name| name.starts_with("lockstep-") && name.ends_with(".tgz"));
        helm_in_namespace(&format!("install lockstep {} --wait", chart.display()));
        installation.wait_webhook("default").await;
        // Without --logs: the pod is deleted when the test has succeeded, and Helm 3 reads its log only then.
        let tested = helm_in_namespace("test lockstep");
        assert!(tested.contains("Succeeded"), "{helm}: {tested}");
        report(&format!("{helm} has installed the chart; helm test:\n{tested}"));
        helm_in_namespace("uninstall lockstep --wait");
    }
}

/// The file of this release for this machine.
fn file(dist: &Path, part: &str, end: &str) -> PathBuf {
    let architecture = if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" };
    file_named(dist, |name| name.contains(part) && name.ends_with(&format!("{architecture}{end}")))
}

fn file_named(dist: &Path, wanted: impl Fn(&str) -> bool) -> PathBuf {
    let files = fs::read_dir(dist).unwrap_or_else(|error| panic!("{}: {error}", dist.display()));
    let mut paths = files.filter_map(|entry| Some(entry.ok()?.path()));
    let is_wanted = |path: &PathBuf| path.file_name().and_then(|name| name.to_str()).is_some_and(&wanted);
    paths.find(is_wanted).expect("the file of the release")
}

/// The binary in the archive, in a directory that is removed in the end.
struct Unpacked(PathBuf);

impl Drop for Unpacked {
    fn drop(&mut self) {
        drop(self.0.parent().map(fs::remove_dir_all));
    }
}

fn unpacked(dist: &Path) -> Unpacked {
    let dir = env::temp_dir().join(format!("release-{}", std::process::id()));
    fs::create_dir_all(&dir).expect("a directory");
    run(Command::new("tar").arg("-xzf").arg(file(dist, "-linux-", ".tar.gz")).current_dir(&dir));
    Unpacked(dir.join("lockstep"))
}
