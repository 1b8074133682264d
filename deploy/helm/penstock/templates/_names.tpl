{{/* What the names of all objects begin with. */}}
{{- define "penstock.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride }}
{{- else if contains (include "penstock.chart" .) .Release.Name -}}
{{ .Release.Name }}
{{- else -}}
{{ .Release.Name }}-{{ include "penstock.chart" . }}
{{- end -}}
{{- end -}}

{{- define "penstock.chart" -}}
{{ default .Chart.Name .Values.nameOverride }}
{{- end -}}

{{/* (list $ "router"): the name of an object. A StatefulSet's pods carry its name and 11 characters in
a label of 63. */}}
{{- define "penstock.name" -}}
{{- $name := printf "%s-%s" (include "penstock.fullname" (index . 0)) (index . 1) -}}
{{- if gt (len $name) 52 -}}
{{- fail (printf "the name %s has %d characters, and 52 are possible: choose a shorter release name, fullnameOverride or models[].name" $name (len $name)) -}}
{{- end -}}
{{ $name }}
{{- end -}}

{{/* (dict "root" $ "component" "engine" "model" "demo"): what pods are chosen by. */}}
{{- define "penstock.selector" -}}
app.kubernetes.io/name: {{ include "penstock.chart" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .model }}
penstock/model: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* What objects have beside it; pods do not, since a new version of the chart alone starts none anew. */}}
{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* (list $ "router"): an image. */}}
{{- define "penstock.image" -}}
{{- $image := (index . 0).Values.image -}}
{{ $image.prefix }}/{{ index . 1 }}:{{ default (index . 0).Chart.AppVersion $image.tag }}
{{- end -}}

{{/* The Secrets: yours or the chart's. */}}
{{- define "penstock.secretName" -}}
{{ .Values.secret.existingSecret | default (include "penstock.name" (list . "secret")) }}
{{- end -}}

{{- define "penstock.keysName" -}}
{{ .Values.keys.existingSecret | default (include "penstock.name" (list . "keys")) }}
{{- end -}}

{{- define "penstock.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "penstock.fullname" .) }}
{{- end -}}

{{/* (dict "root" $ "name" … "key" …): what stands in a Secret of the cluster, or something new. */}}
{{- define "penstock.kept" -}}
{{- $there := (lookup "v1" "Secret" .root.Release.Namespace .name).data | default dict -}}
{{ get $there .key | default (randAlphaNum 48 | b64enc) }}
{{- end -}}

{{/* The Secret with the key for /metrics, as a reference to one of its keys. */}}
{{- define "penstock.metricsKey" -}}
{{- $own := .Values.metricsKey -}}
{{- if and .Values.keys.existingSecret (not $own.existingSecret) -}}
{{- fail "metricsKey: keys.existingSecret may hold several keys; name a Secret that holds the one for /metrics alone in metricsKey.existingSecret and its key in metricsKey.key" -}}
{{- end -}}
name: {{ $own.existingSecret | default (include "penstock.keysName" .) | quote }}
key: {{ ternary $own.key .Values.keys.apiKeys (not (empty $own.existingSecret)) | required "metricsKey.key: which key of metricsKey.existingSecret holds the API key for /metrics?" | quote }}
{{- end -}}
