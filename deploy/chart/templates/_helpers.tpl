{{/* The kinds that webhooks and policy look at. */}}
{{- define "lockstep.kinds" -}}
[configmaps{{ if .Values.secrets }}, secrets{{ end }}]
{{- end }}

{{/* A list of strings in CEL. */}}
{{- define "lockstep.cel" -}}
[{{ range $i, $name := . }}{{ if $i }}, {{ end }}'{{ $name | replace "\\" "\\\\" | replace "'" "\\'" }}'{{ end }}]
{{- end }}

{{/* A setting of the Deployment that is a list, where it is not empty. A lone dollar might begin a reference. */}}
{{- define "lockstep.names" -}}
{{- if .names }}
            - name: {{ .variable }}
              value: {{ join "," .names | replace "$" "$$" | quote }}
{{- end }}
{{- end }}

{{/* Labels that people add to what Prometheus and Grafana select. */}}
{{- define "lockstep.monitoringLabels" -}}
{{- with .Values.monitoringLabels }}
{{- toYaml . | nindent 4 }}
{{- end }}
{{- end }}
