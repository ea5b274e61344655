{{- define "tersely.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "tersely.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tersely.labels" -}}
{{ include "tersely.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "tersely.image" -}}
{{- if .Values.image.digest }}{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else }}{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "tersely.secret" -}}
{{- if .Values.existingSecret }}{{ .Values.existingSecret }}
{{- else if hasKey .Values.secrets "DATABASE_URL" }}{{ include "tersely.name" . }}
{{- else }}{{ fail "name the Secret with DATABASE_URL as existingSecret, or set secrets.DATABASE_URL: the chart brings no Postgres" }}{{ end }}
{{- end }}
