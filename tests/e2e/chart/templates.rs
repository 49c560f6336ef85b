//! Generates the chart's templates from the files of deploy/ by replacing names with Helm values. The templates are
//! committed, so that the chart can be read and packaged; `make chart` writes them, and a test fails if they are
//! outdated.

use std::{fs, path::Path};

use lockstep::manifests::cert_manager::{
    AFTER_ENVIRONMENT, BUNDLE_RIGHTS, END_OF_CONTAINER, ENVIRONMENT, SECRET_RIGHTS, VOLUMES,
};
use lockstep_core::text::substitute;

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
/// The labels of every object.
const LABELS: &str = "  labels:\n    app.kubernetes.io/name: lockstep";
const COMMON_LABELS: (&str, &str) = (
    LABELS,
    concat!(
        "  labels:\n    app.kubernetes.io/name: lockstep",
        "\n    {{- include \"lockstep.commonLabels\" . }}"
    ),
);
/// The end of the pod's metadata.
const POD_LABELS: (&str, &str) = (
    "        app.kubernetes.io/name: lockstep\n    spec:\n",
    "        app.kubernetes.io/name: lockstep
        {{- with include \"lockstep.podLabels\" . }}
        {{- . | nindent 8 }}
        {{- end }}
    spec:
",
);
const ACCOUNT: (&str, &str) = (
    "kind: ServiceAccount\nmetadata:\n",
    "kind: ServiceAccount
metadata:
  {{- with .Values.serviceAccount.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
",
);
const INGRESS: (&str, &str) = (
    "  ingress:
    - ports:
        - port: 9443
        - port: 8080
",
    "  ingress:
    {{- include \"lockstep.ingress\" . | nindent 4 }}
",
);
/// Prometheus templates have the syntax of Helm templates and are escaped.
const ESCAPED: (&str, &str) = ("{{ $", "{{ \"{{\" }} $");
const RUNBOOKS: (&str, &str) =
    ("runbook_url: docs/operations.md", "runbook_url: {{ .Values.metrics.runbookUrl }}");
const INTERVAL: (&str, &str) = ("interval: 30s", "interval: {{ .Values.metrics.interval }}");
const METRICS_LABELS: (&str, &str) = (
    LABELS,
    "  labels:
    app.kubernetes.io/name: lockstep
    {{- include \"lockstep.metricsLabels\" . }}",
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
            only_with(
                ".Values.secrets",
                &fill("components/secrets/rbac.yaml", &[NAMESPACE, DOMAIN, COMMON_LABELS]),
            ),
        ),
        ("templates/policy.yaml", only_with(".Values.policy", &policy())),
        (
            "templates/certificates.yaml",
            only_with(
                ".Values.certManager",
                &fill("components/cert-manager/certificates.yaml", &[NAMESPACE, COMMON_LABELS]),
            ),
        ),
        (
            "templates/podmonitor.yaml",
            only_with(
                "and .Values.metrics.enabled .Values.metrics.podMonitor",
                &fill("components/monitoring/podmonitor.yaml", &[NAMESPACE, METRICS_LABELS, INTERVAL]),
            ),
        ),
        (
            "templates/rules.yaml",
            only_with(
                "and .Values.metrics.enabled .Values.metrics.rules",
                &fill(
                    "components/monitoring/rules.yaml",
                    &[NAMESPACE, DOMAIN, METRICS_LABELS, ESCAPED, RUNBOOKS],
                ),
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
        &[
            NAMESPACE,
            COMMON_LABELS,
            ACCOUNT,
            (BUNDLE_RIGHTS, &ours(BUNDLE_RIGHTS)),
            (SECRET_RIGHTS, &ours(SECRET_RIGHTS)),
            DOMAIN,
        ],
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
    fill(
        "base/webhook.yaml",
        &[NAMESPACE, DOMAIN, SUFFIX, KINDS, COMMON_LABELS, ("\nwebhooks:\n", annotation)],
    )
}

fn policy() -> String {
    let users = "username in {{ include \"lockstep.cel\" .Values.exemptUsers }}";
    let groups = "group in {{ include \"lockstep.cel\" .Values.exemptGroups }}";
    fill(
        "components/policy/policy.yaml",
        &[NAMESPACE, DOMAIN, KINDS, COMMON_LABELS, ("username in []", users), ("group in []", groups)],
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
            {{{{- if .Values.clientCAConfigMap }}}}
            - name: LOCKSTEP_CLIENT_CA
              value: /etc/lockstep/client-ca/ca.crt
            {{{{- end }}}}
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
        let text = substitute(text, &[NAMESPACE, PRIORITY, COMMON_LABELS]);
        format!("{indent}{{{{- if .Values.priorityClassName }}}}\n{text}{indent}{{{{- end }}}}\n")
    };
    let quota = quota();
    let (affinity, spread, policy) = (
        part("      affinity:\n", "      topologySpreadConstraints:\n"),
        part("      topologySpreadConstraints:\n", "      securityContext:\n"),
        network_policy(),
    );
    let only_with_policy = format!(
        "{{{{- if .Values.networkPolicy.enabled }}}}\n{}{{{{- end }}}}\n",
        substitute(&policy, &[NAMESPACE, COMMON_LABELS, INGRESS])
    );
    let (mounts, volumes) = VOLUMES.split_once("      volumes:\n").expect("mounts and volumes");
    let mounts = mounts.strip_prefix("          volumeMounts:\n").expect("mounts");
    let end = format!(
        "{END_OF_CONTAINER}          {{{{- if or .Values.certManager .Values.clientCAConfigMap }}}}
          volumeMounts:
            {{{{- if .Values.certManager }}}}
{mounts}            {{{{- end }}}}
            {{{{- if .Values.clientCAConfigMap }}}}
            - name: client-ca
              mountPath: /etc/lockstep/client-ca
              readOnly: true
            {{{{- end }}}}
      volumes:
            {{{{- if .Values.certManager }}}}
{volumes}            {{{{- end }}}}
            {{{{- with .Values.clientCAConfigMap }}}}
        - name: client-ca
          configMap:
            name: {{{{ . }}}}
            {{{{- end }}}}
          {{{{- end }}}}
"
    );
    fill(
        "base/deployment.yaml",
        &[
            NAMESPACE,
            DOMAIN,
            SUFFIX,
            (&policy, &only_with_policy),
            COMMON_LABELS,
            POD_LABELS,
            (&affinity, &unless_given("affinity", &affinity)),
            (&spread, &unless_given("topologySpreadConstraints", &spread)),
            ("replicas: 2", "replicas: {{ .Values.replicas }}"),
            ("    metadata:\n      labels:\n", pod_metadata),
            ("      serviceAccountName: lockstep\n", &pod),
            (&quota, &only_with_priority(&quota, "")),
            (POD_PRIORITY, &only_with_priority(POD_PRIORITY, "      ")),
            (IMAGE, "image: {{ include \"lockstep.image\" . }}"),
            ("imagePullPolicy: IfNotPresent", "imagePullPolicy: {{ .Values.image.pullPolicy }}"),
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

/// The NetworkPolicy with the separator before it: it is the last document.
fn network_policy() -> String {
    let text = read("base/deployment.yaml");
    let (_, policy) = text.rsplit_once("---\n").expect("several documents");
    assert!(policy.contains("kind: NetworkPolicy\n"), "{policy}");
    format!("---\n{policy}")
}

/// The part of the Deployment from a line to another.
fn part(from: &str, to: &str) -> String {
    let text = read("base/deployment.yaml");
    let (_, rest) = text.split_once(from).expect("the first line");
    let (part, _) = rest.split_once(to).expect("the line after the last");
    format!("{from}{part}")
}

/// A field of the pod, with this default.
fn unless_given(value: &str, default: &str) -> String {
    format!(
        "      {{{{- if .Values.{value} }}}}
      {value}:
        {{{{- toYaml .Values.{value} | nindent 8 }}}}
      {{{{- else }}}}
{default}      {{{{- end }}}}
"
    )
}

/// A file of deploy/ with values filled in. It panics if a word to replace is missing: its value would have no effect.
fn fill(path: &str, pairs: &[(&str, &str)]) -> String {
    let text = read(path);
    for (word, _) in pairs {
        assert!(text.contains(word), "deploy/{path} has no `{word}`: update {}", file!());
    }
    substitute(&text, pairs)
}

fn only_with(condition: &str, text: &str) -> String {
    format!("{{{{- if {condition} }}}}\n{text}{{{{- end }}}}\n")
}

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
