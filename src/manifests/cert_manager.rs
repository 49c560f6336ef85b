//! What the component `cert-manager` changes in other files, as its kustomization does: the certificate comes from a
//! Secret that cert-manager writes, and the RBAC for generated certificates is removed.

/// The text after the Deployment's environment.
pub const AFTER_ENVIRONMENT: &str = "          ports:
            - name: webhook
";
pub const ENVIRONMENT: &str = "            - name: LOCKSTEP_TLS_CERT
              value: /etc/lockstep/tls/tls.crt
            - name: LOCKSTEP_TLS_KEY
              value: /etc/lockstep/tls/tls.key
";
/// The end of the Deployment.
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
/// The text after the metadata of webhook configurations.
const WEBHOOKS: &str = "
webhooks:
";
/// The RBAC for generated certificates.
pub const BUNDLE_RIGHTS: &str = "  # the caBundle of the webhook's own webhooks
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

/// Texts in the files, and their replacements.
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
    use super::{
        super::{DEPLOYMENT_FILE, RBAC_FILE, WEBHOOK_FILE},
        *,
    };

    #[test]
    fn replaced_texts_are_in_their_files() {
        for (file, text, times) in [
            (DEPLOYMENT_FILE, AFTER_ENVIRONMENT, 1),
            (DEPLOYMENT_FILE, END_OF_CONTAINER, 1),
            (WEBHOOK_FILE, WEBHOOKS, 2),
            (RBAC_FILE, BUNDLE_RIGHTS, 1),
            (RBAC_FILE, SECRET_RIGHTS, 1),
        ] {
            assert_eq!(file.matches(text).count(), times, "{text}");
        }
    }
}
