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

{{/* More labels for the objects that Prometheus and Grafana select. */}}
{{- define "lockstep.monitoringLabels" -}}
{{- with .Values.monitoringLabels }}
{{- toYaml . | nindent 4 }}
{{- end }}
{{- end }}
