//! Generates the chart's templates from the files of deploy/ by replacing names with Helm values. The templates are
//! committed, so that the chart can be read and packaged; `make chart` writes them, and a test fails if they are outdated.

use std::{fs, path::Path};

use lockstep::{
    cli::manifests::cert_manager::{
        AFTER_ENVIRONMENT, BUNDLE_RIGHTS, END_OF_CONTAINER, ENVIRONMENT, SECRET_RIGHTS, VOLUMES,
    },
    substitute::substitute,
};

const RESOURCES: &str = "          resources:
            requests:
              cpu: 20m
              memory: 64Mi
            limits:
              memory: 256Mi
";
const PRIORITY: (&str, &str) = ("system-cluster-critical", "{{ .Values.priorityClassName }}");
const POD_PRIORITY: &str = "      priorityClassName: system-cluster-critical\n";
const NAMES: [(&str, &str); 4] = [
    ("EXEMPT_USER", "exemptUsers"),
    ("EXEMPT_GROUP", "exemptGroups"),
    ("DEPUTY_USER", "deputyUsers"),
    ("DEPUTY_GROUP", "deputyGroups"),
];

const NAMESPACE: (&str, &str) = ("lockstep-system", "{{ .Release.Namespace }}");
const DOMAIN: (&str, &str) = ("workshop.io", "{{ .Values.domain }}");
const SUFFIX: (&str, &str) = ("-synced", "{{ .Values.suffix }}");
const KINDS: (&str, &str) = ("resources: [configmaps]", "resources: {{ include \"lockstep.kinds\" . }}");
const IMAGE: &str = concat!("image: lockstep:", env!("CARGO_PKG_VERSION"));
/// Prometheus templates have the syntax of Helm templates and are escaped.
const LABELS: (&str, &str) = ("{{ $", "{{ \"{{\" }} $");
const MONITORING_LABELS: (&str, &str) = (
    "name: lockstep\nspec:\n",
    "name: lockstep\n    {{- include \"lockstep.monitoringLabels\" . }}\nspec:\n",
);

/// Path in the chart, and content.
type File = (&'static str, String);

/// All generated files.
pub fn generate() -> Vec<File> {
    vec![
        ("templates/rbac.yaml", rbac()),
        ("templates/webhook.yaml", webhook()),
        ("templates/deployment.yaml", deployment()),
        (
            "templates/secrets.yaml",
            only_with("secrets", &fill("components/secrets/rbac.yaml", &[NAMESPACE, DOMAIN])),
        ),
        ("templates/policy.yaml", only_with("policy", &policy())),
        (
            "templates/certificates.yaml",
            only_with("certManager", &fill("components/cert-manager/certificates.yaml", &[NAMESPACE])),
        ),
        (
            "templates/podmonitor.yaml",
            only_with(
                "monitoring",
                &fill("components/monitoring/podmonitor.yaml", &[NAMESPACE, MONITORING_LABELS]),
            ),
        ),
        (
            "templates/rules.yaml",
            only_with(
                "monitoring",
                &fill("components/monitoring/rules.yaml", &[NAMESPACE, DOMAIN, MONITORING_LABELS, LABELS]),
            ),
        ),
        ("dashboard.json", read("components/monitoring/dashboard.json")),
    ]
}

fn rbac() -> String {
    let ours = |rights: &str| {
        let rights = substitute(rights, &[DOMAIN]);
        format!("  {{{{- if not .Values.certManager }}}}\n{rights}  {{{{- end }}}}\n")
    };
    fill(
        "base/rbac.yaml",
        &[NAMESPACE, (BUNDLE_RIGHTS, &ours(BUNDLE_RIGHTS)), (SECRET_RIGHTS, &ours(SECRET_RIGHTS)), DOMAIN],
    )
}

fn webhook() -> String {
    let annotation = "
  {{- if .Values.certManager }}
  annotations:
    cert-manager.io/inject-ca-from: {{ .Release.Namespace }}/lockstep-tls
  {{- end }}
webhooks:
";
    fill("base/webhook.yaml", &[NAMESPACE, DOMAIN, SUFFIX, KINDS, ("\nwebhooks:\n", annotation)])
}

fn policy() -> String {
    let users = "username in {{ include \"lockstep.cel\" .Values.exemptUsers }}";
    let groups = "group in {{ include \"lockstep.cel\" .Values.exemptGroups }}";
    fill(
        "components/policy/policy.yaml",
        &[NAMESPACE, DOMAIN, KINDS, ("username in []", users), ("group in []", groups)],
    )
}

fn deployment() -> String {
    let names: String = NAMES
        .iter()
        .map(|(variable, value)| {
            let arguments = format!("dict \"variable\" \"LOCKSTEP_{variable}\" \"names\" .Values.{value}");
            format!("            {{{{- include \"lockstep.names\" ({arguments}) }}}}\n")
        })
        .collect();
    let kinds = format!("value: configmaps{{{{ if .Values.secrets }}}},secrets{{{{ end }}}}\n{names}");
    let after_environment = format!(
        "            {{{{- if .Values.certManager }}}}\n{ENVIRONMENT}            {{{{- end }}}}
            {{{{- with .Values.extraEnv }}}}
            {{{{- toYaml . | nindent 12 }}}}
            {{{{- end }}}}
{AFTER_ENVIRONMENT}"
    );
    let pod_metadata = "    metadata:
      {{- with .Values.podAnnotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      labels:
";
    let pod: String = ["imagePullSecrets", "nodeSelector", "tolerations"]
        .iter()
        .map(|value| {
            let field = format!("      {value}:\n        {{{{- toYaml . | nindent 8 }}}}\n");
            format!("      {{{{- with .Values.{value} }}}}\n{field}      {{{{- end }}}}\n")
        })
        .collect();
    let pod = format!("      serviceAccountName: lockstep\n{pod}");
    let only_with_priority = |text: &str, indent: &str| {
        let text = substitute(text, &[NAMESPACE, PRIORITY]);
        format!("{indent}{{{{- if .Values.priorityClassName }}}}\n{text}{indent}{{{{- end }}}}\n")
    };
    let quota = quota();
    let end = format!(
        "{END_OF_CONTAINER}          {{{{- if .Values.certManager }}}}\n{VOLUMES}          {{{{- end }}}}\n"
    );
    fill(
        "base/deployment.yaml",
        &[
            NAMESPACE,
            DOMAIN,
            SUFFIX,
            ("replicas: 2", "replicas: {{ .Values.replicas }}"),
            ("    metadata:\n      labels:\n", pod_metadata),
            ("      serviceAccountName: lockstep\n", &pod),
            (&quota, &only_with_priority(&quota, "")),
            (POD_PRIORITY, &only_with_priority(POD_PRIORITY, "      ")),
            (IMAGE, "image: {{ .Values.image }}"),
            ("args: [run]", "args: [run{{ range .Values.extraArgs }}, {{ quote . }}{{ end }}]"),
            ("value: configmaps\n", &kinds),
            (AFTER_ENVIRONMENT, &after_environment),
            (RESOURCES, "          resources:\n            {{- toYaml .Values.resources | nindent 12 }}\n"),
            (END_OF_CONTAINER, &end),
        ],
    )
}

/// The ResourceQuota, which is the first document.
fn quota() -> String {
    let text = read("base/deployment.yaml");
    let (quota, _) = text.split_once("---\n").expect("several documents");
    format!("{quota}---\n")
}

/// A file of deploy/ with values filled in. It panics if a word to replace is missing: its value would have no effect.
fn fill(path: &str, pairs: &[(&str, &str)]) -> String {
    let text = read(path);
    for (word, _) in pairs {
        assert!(text.contains(word), "deploy/{path} has no `{word}`: update {}", file!());
    }
    substitute(&text, pairs)
}

fn only_with(value: &str, text: &str) -> String {
    format!("{{{{- if .Values.{value} }}}}\n{text}{{{{- end }}}}\n")
}

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
