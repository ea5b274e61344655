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

{{- /*
The memory that a pod may take at the most, in MiB; docs/scaling.md has the sum. A worker: 320 for itself and the replies
that it relays; live sessions, and six caches with an eighth of their budget each; bodies in flight; each query of an
agent with its process. Beside the workers 256 for the parent process and for commands in the container.
*/}}
{{- define "tersely.memory" -}}
{{- $settings := .Values.settings }}
{{- $given := get $settings "live_sessions" | default 256 | toString }}
{{- $live := eq $given "off" | ternary 0 (int $given) }}
{{- $cache := eq $live 0 | ternary 32 (div $live 8) }}
{{- $body := get $settings "body_memory" | default 512 | int }}
{{- $query := div (get $settings "query_memory" | default 268435456 | int64) 1048576 }}
{{- $children := get $settings "query_children" | default 4 | int }}
{{- $worker := add 320 $live (mul 6 $cache) $body (mul $children (add $query 64)) }}
{{- add 256 (mul .Values.workers $worker) }}Mi
{{- end }}
