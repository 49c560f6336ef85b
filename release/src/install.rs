//! `install.yaml`: what `lockstep manifests` prints, with how to apply it.

use lockstep::manifests::Manifests;

/// Without the Namespace: `kubectl delete -f install.yaml` would delete it with everything in it.
pub fn manifests(version: &str, image: &str) -> String {
    let manifests = Manifests { image: image.to_owned(), ..Manifests::default() };
    let namespace = &manifests.namespace;
    format!(
        "\
# Lockstep {version} for ConfigMaps, in the namespace {namespace}. To install it:
#
#   kubectl create namespace {namespace}
#   kubectl apply -f install.yaml
#   kubectl -n {namespace} rollout status deployment lockstep
#
# Until the first replica is ready, writes of labelled objects fail. To remove it; sources, companions and the namespace
# stay as they are:
#
#   kubectl delete -f install.yaml
#
# This is what `lockstep manifests` prints. For Secrets, alerts, cert-manager or another namespace, without installing
# anything on your machine:
#
#   docker run --rm {image} manifests --image {image} --secrets | kubectl apply -f -
#   docker run --rm {image} manifests --help
{}",
        manifests.render()
    )
}
