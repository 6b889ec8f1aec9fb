{{- define "kvasir.labels" -}}
app.kubernetes.io/name: kvasir
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvasir.security" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kvasir.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "kvasir.settings" -}}
{{- $model := dict "model" .Values.model.name }}
{{- toYaml (mergeOverwrite (dict "gateway" $model "worker" (deepCopy $model)) (deepCopy .Values.settings)) }}
{{- end }}
