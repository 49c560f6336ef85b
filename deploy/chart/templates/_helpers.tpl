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

{{/* The labels of the user for every object, besides those that Helm recommends, which they may replace. */}}
{{- define "lockstep.commonLabels" -}}
{{- $release := dict "app.kubernetes.io/instance" .Release.Name "app.kubernetes.io/managed-by" .Release.Service
  "app.kubernetes.io/version" .Chart.AppVersion
  "helm.sh/chart" (printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_")) -}}
{{- toYaml (mergeOverwrite $release (.Values.commonLabels | default dict)) | nindent 4 }}
{{- end }}

{{/* The same with the labels of the user for what Prometheus and Grafana select. */}}
{{- define "lockstep.metricsLabels" -}}
{{- $common := fromYaml (include "lockstep.commonLabels" .) -}}
{{- toYaml (mergeOverwrite $common (.Values.metrics.labels | default dict)) | nindent 4 }}
{{- end }}

{{/* The labels of the user for pods. Those of the release are left out: a new version of the chart alone replaces no pod. */}}
{{- define "lockstep.podLabels" -}}
{{- with mergeOverwrite (dict) (.Values.commonLabels | default dict) (.Values.podLabels | default dict) -}}
{{- toYaml . }}
{{- end }}
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
