{{/* The kinds that webhooks and policy match. */}}
{{- define "lockstep.kinds" -}}
[configmaps{{ if .Values.secrets }}, secrets{{ end }}]
{{- end }}

{{/* A list of strings in CEL. */}}
{{- define "lockstep.cel" -}}
[{{ range $i, $name := . }}{{ if $i }}, {{ end }}'{{ $name | replace "\\" "\\\\" | replace "'" "\\'" }}'{{ end }}]
{{- end }}

{{/* A list as a variable of the Deployment, unless it is empty. $(NAME) would refer to a variable, so $ is doubled. */}}
{{- define "lockstep.names" -}}
{{- if .names }}
            - name: {{ .variable }}
              value: {{ join "," .names | replace "$" "$$" | quote }}
{{- end }}
{{- end }}

{{/* More labels for every object: those of the release, as Helm recommends them, and those of the user, who may replace them. */}}
{{- define "lockstep.commonLabels" -}}
{{- toYaml (merge (dict) .Values.commonLabels (fromYaml (include "lockstep.releaseLabels" .))) | nindent 4 }}
{{- end }}

{{/* The same with labels for the objects that Prometheus and Grafana select. */}}
{{- define "lockstep.metricsLabels" -}}
{{- $common := merge (dict) .Values.commonLabels (fromYaml (include "lockstep.releaseLabels" .)) -}}
{{- toYaml (merge (dict) .Values.metrics.labels $common) | nindent 4 }}
{{- end }}

{{- define "lockstep.releaseLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* More labels of the pods. Those of the release are left out: a new version of the chart alone replaces no pod. */}}
{{- define "lockstep.podLabels" -}}
{{- with merge (dict) .Values.podLabels .Values.commonLabels }}{{ toYaml . }}{{ end }}
{{- end }}

{{/* The image, by digest if there is one. */}}
{{- define "lockstep.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end }}

{{/* The rules of the NetworkPolicy: everybody, or those whom the values name. */}}
{{- define "lockstep.ingress" -}}
{{- $policy := .Values.networkPolicy -}}
{{- if not (or $policy.apiServerCIDRs $policy.metricsFrom) -}}
- ports:
    - port: 9443
    - port: 8080
{{- else -}}
- ports:
    - port: 9443
  {{- if $policy.apiServerCIDRs }}
  from:
    {{- range concat $policy.apiServerCIDRs $policy.nodeCIDRs }}
    - ipBlock:
        cidr: {{ quote . }}
    {{- end }}
  {{- end }}
- ports:
    - port: 8080
  {{- if $policy.metricsFrom }}
  from:
    {{- range $policy.nodeCIDRs }}
    - ipBlock:
        cidr: {{ quote . }}
    {{- end }}
    {{- toYaml $policy.metricsFrom | nindent 4 }}
  {{- end }}
{{- end -}}
{{- end }}
