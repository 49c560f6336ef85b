//! Configuration of containerd, kubelet and kube-proxy.

use std::path::Path;

use serde_json::{Value, json};

use super::preflight::plugins;
use super::sandbox::NODE;

/// The image of the pause container, which keeps a pod's namespaces open.
pub(crate) const PAUSE: &str = "localhost/pause:1";
/// Where containerd listens on the node.
pub(crate) const SOCKET: &str = "/run/containerd/containerd.sock";
/// Addresses of pods.
const PODS: &str = "10.250.1.0/24";

/// Without AppArmor profiles, and for a machine on which root may not lower an OOM score.
pub(crate) fn containerd(dir: &Path) -> String {
    let plugins = plugins().unwrap_or(Path::new("/opt/cni/bin")).display();
    let dir = dir.display();
    format!(
        r#"version = 2
root = "{dir}/containerd"
state = "/run/containerd"
[grpc]
  address = "{SOCKET}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{dir}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{dir}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
"#
    )
}

/// The network of pods: a bridge on the node.
pub(crate) fn network() -> Value {
    json!({
        "cniVersion": "1.0.0",
        "name": "pods",
        "plugins": [{
            "type": "bridge",
            "bridge": "pods",
            "isGateway": true,
            "ipMasq": false,
            "hairpinMode": true,
            "ipam": {
                "type": "host-local",
                "dataDir": "/run/pods",
                "ranges": [[{ "subnet": PODS }]],
                "routes": [{ "dst": "0.0.0.0/0" }],
            },
        }],
    })
}

/// A nearly full disk must neither evict pods nor delete images, which cannot be pulled again.
pub(crate) fn kubelet(dir: &Path) -> Value {
    let file = |name: &str| dir.join(name);
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": false,
        "failSwapOn": false,
        "oomScoreAdj": 0,
        "containerRuntimeEndpoint": format!("unix://{SOCKET}"),
        "authentication": {
            "anonymous": { "enabled": false },
            "webhook": { "enabled": true },
            "x509": { "clientCAFile": file("ca.crt") },
        },
        "authorization": { "mode": "Webhook" },
        "tlsCertFile": file("kubelet.crt"),
        "tlsPrivateKeyFile": file("kubelet.key"),
        "resolvConf": file("resolv.conf"),
        "podLogsDir": file("pods"),
        "volumePluginDir": file("volume-plugins"),
        // A killed container restarts quickly, so that tests do not wait.
        "crashLoopBackOff": { "maxContainerRestartPeriod": "2s" },
        "nodeStatusUpdateFrequency": "5s",
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {
            "memory.available": "50Mi",
            "nodefs.available": "0%",
            "nodefs.inodesFree": "0%",
            "imagefs.available": "0%",
            "imagefs.inodesFree": "0%",
        },
    })
}

/// Leaves the machine's limits of connection tracking alone.
pub(crate) fn kube_proxy(kubeconfig: &Path) -> Value {
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "oomScoreAdj": 0,
        "hostnameOverride": super::NAME,
        "clusterCIDR": PODS,
        "clientConnection": { "kubeconfig": kubeconfig },
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
    })
}

/// Flags of the API server: how to call the kubelet, and the address to advertise.
pub(crate) fn apiserver_flags(dir: &Path) -> Vec<String> {
    let file = |name: &str| dir.join(name).display().to_string();
    vec![
        "--bind-address=0.0.0.0".to_owned(),
        format!("--advertise-address={NODE}"),
        "--endpoint-reconciler-type=lease".to_owned(),
        // This flag accumulates: Node is added to RBAC.
        "--authorization-mode=Node".to_owned(),
        "--enable-admission-plugins=NodeRestriction".to_owned(),
        "--kubelet-preferred-address-types=InternalIP".to_owned(),
        format!("--kubelet-certificate-authority={}", file("ca.crt")),
        format!("--kubelet-client-certificate={}", file("kubelet-client.crt")),
        format!("--kubelet-client-key={}", file("kubelet-client.key")),
    ]
}
