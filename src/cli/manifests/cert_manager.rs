//! What the component `cert-manager` changes in other files, as its kustomization does: certificates come from a Secret
//! that it fills, and the rights to make our own go.

/// Where the Deployment's environment ends.
pub const AFTER_ENVIRONMENT: &str = "          ports:
            - name: webhook
";
pub const ENVIRONMENT: &str = "            - name: LOCKSTEP_TLS_CERT
              value: /etc/lockstep/tls/tls.crt
            - name: LOCKSTEP_TLS_KEY
              value: /etc/lockstep/tls/tls.key
";
/// Where the Deployment ends.
pub const END_OF_CONTAINER: &str = "              drop: [ALL]
";
pub const VOLUMES: &str = "          volumeMounts:
            - name: tls
              mountPath: /etc/lockstep/tls
              readOnly: true
      volumes:
        - name: tls
          secret:
            secretName: lockstep-tls
";
/// Where the metadata of webhook configurations ends.
const WEBHOOKS: &str = "
webhooks:
";
/// The rights to look after certificates of our own.
pub const BUNDLE_RIGHTS: &str = "  # the caBundle of the guard's own webhooks
  - apiGroups: [admissionregistration.k8s.io]
    resources: [validatingwebhookconfigurations, mutatingwebhookconfigurations]
    resourceNames: [lockstep.workshop.io]
    verbs: [list, watch, patch]
";
pub const SECRET_RIGHTS: &str = "  - apiGroups: [\"\"]
    resources: [secrets]
    verbs: [create]
  - apiGroups: [\"\"]
    resources: [secrets]
    resourceNames: [lockstep.workshop.io]
    verbs: [list, watch, patch]
";

/// Words of the files, and what takes their place.
pub(super) fn changes(namespace: &str) -> Vec<(&'static str, String)> {
    let annotation = format!("cert-manager.io/inject-ca-from: {namespace}/lockstep-tls");
    vec![
        (AFTER_ENVIRONMENT, format!("{ENVIRONMENT}{AFTER_ENVIRONMENT}")),
        (END_OF_CONTAINER, format!("{END_OF_CONTAINER}{VOLUMES}")),
        (WEBHOOKS, format!("\n  annotations:\n    {annotation}{WEBHOOKS}")),
        (BUNDLE_RIGHTS, String::new()),
        (SECRET_RIGHTS, String::new()),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::{DEPLOYMENT_FILE, RBAC_FILE, WEBHOOK_FILE};
    use super::*;

    #[test]
    fn each_word_is_in_its_file() {
        for (file, word, times) in [
            (DEPLOYMENT_FILE, AFTER_ENVIRONMENT, 1),
            (DEPLOYMENT_FILE, END_OF_CONTAINER, 1),
            (WEBHOOK_FILE, WEBHOOKS, 2),
            (RBAC_FILE, BUNDLE_RIGHTS, 1),
            (RBAC_FILE, SECRET_RIGHTS, 1),
        ] {
            assert_eq!(file.matches(word).count(), times, "{word}");
        }
    }
}
