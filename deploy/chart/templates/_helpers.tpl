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

{{/* More labels for every object. */}}
{{- define "lockstep.commonLabels" -}}
{{- with .Values.commonLabels }}
{{- toYaml . | nindent 4 }}
{{- end }}
{{- end }}

{{/* More labels for the objects that Prometheus and Grafana select. */}}
{{- define "lockstep.metricsLabels" -}}
{{- with .Values.metrics.labels }}
{{- toYaml . | nindent 4 }}
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
