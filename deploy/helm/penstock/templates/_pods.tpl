{{/* Parts of pods. In each container Penstock's process is the only command: it gets the signal to drain. */}}

{{/* (dict "root" $ "own" .Values.router "grace" 45): what all pods have. */}}
{{- define "penstock.pod" -}}
{{- $root := .root -}}
serviceAccountName: {{ include "penstock.serviceAccount" $root | quote }}
automountServiceAccountToken: false
# Else Kubernetes would set variables of the names of Services, and PENSTOCK_… are settings.
enableServiceLinks: false
# The pause container is process 1: it reaps what is orphaned, and a signal during the start ends Penstock's.
shareProcessNamespace: true
terminationGracePeriodSeconds: {{ .grace }}
securityContext:
  {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .own.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .own.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "own" .Values.router "model" . ): annotations by which a change of settings starts pods
anew. */}}
{{- define "penstock.annotations" -}}
penstock/settings: {{ include "penstock.settings" (dict "root" .root "model" .model) | sha256sum | trunc 16 | quote }}
{{- with .own.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "model" …): the file of settings of a model's processes, or of those of no model. */}}
{{- define "penstock.settings" -}}
{{- $settings := deepCopy .root.Values.settings -}}
{{- with .model -}}
{{- range $name, $value := .settings | default dict -}}
{{- $_ := set $settings $name $value -}}
{{- end -}}
{{- end -}}
{{- range $name, $place := include "penstock.ownSettings" . | fromYaml -}}
{{- range list $name (replace "_" "-" $name) -}}
{{- if hasKey $settings . -}}
{{- fail (printf "settings.%s: the chart sets it itself; see %s" . $place) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{ toYaml $settings }}
{{- end -}}

{{/* Settings that the chart gives, and the value that decides each. */}}
{{- define "penstock.ownSettings" -}}
model: models[].path
served_model_name: models[].servedNames
expected_models: models
router: fullnameOverride
bind: the chart's templates
advertise: the chart's templates
port_range: the chart's templates
runtime_dir: the chart's templates
state_file: the chart's templates
log_format: the chart's templates
secret: secret
engine: models[].engine
rank: models[].engine
tensor_parallel_size: models[].engine.tensorParallelSize
pipeline_parallel_size: models[].engine.pipelineParallelSize
device: models[].engine.device
device_index: models[].engine.gpuResource
drain_timeout_s: drainTimeoutSeconds
host: frontend.service
port: frontend.service
uds: frontend.service
published_host: frontend.service
grpc_port: frontend.grpcPort
grpc_host: frontend.grpcPort
grpc_uds: frontend.grpcPort
tls_cert: frontend.tlsSecret
tls_key: frontend.tlsSecret
api_key: keys
keys_file: keys
insecure: keys.insecure
{{- end -}}

{{/* (dict "root" $ "model" …): variables of all processes, and of a model's. */}}
{{- define "penstock.environment" -}}
- name: PENSTOCK_CONFIG
  value: /etc/penstock/settings/{{ with .model }}{{ .name }}.model{{ else }}penstock{{ end }}.yaml
- name: PENSTOCK_ROUTER
  value: tcp://{{ include "penstock.name" (list .root "router") }}:5570
- name: PENSTOCK_BIND
  value: tcp://0.0.0.0
- name: PENSTOCK_PORT_RANGE
  value: 20000-20099
- name: PENSTOCK_SECRET
  value: file:/etc/penstock/wire/secret
- name: PENSTOCK_DRAIN_TIMEOUT_S
  value: {{ .root.Values.drainTimeoutSeconds | quote }}
- name: PENSTOCK_LOG_FORMAT
  value: json
- name: PENSTOCK_STATE_FILE
  value: /tmp/penstock-state
{{- with .model }}
{{- with .path }}
- name: PENSTOCK_MODEL
  value: {{ . | quote }}
{{- end }}
- name: PENSTOCK_SERVED_MODEL_NAME
  value: {{ .servedNames | default (list .name) | toJson | quote }}
{{- end }}
{{- end -}}

{{/* (dict "tmp" "tmp-worker-0" "model" …): where all containers may write, and what they read. */}}
{{- define "penstock.mounts" -}}
- name: {{ .tmp }}
  mountPath: /tmp
- name: settings
  mountPath: /etc/penstock/settings
  readOnly: true
- name: wire
  mountPath: /etc/penstock/wire
  readOnly: true
{{- with .model }}
{{- if .volume }}
- name: model
  mountPath: {{ .mountPath | default .path }}
  readOnly: true
{{- end }}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "tmps" (list "tmp") "model" …) */}}
{{- define "penstock.volumes" -}}
{{- range .tmps -}}
- name: {{ . }}
  emptyDir: {medium: Memory}
{{ end -}}
- name: settings
  configMap:
    name: {{ include "penstock.name" (list .root "settings") }}
- name: wire
  secret:
    secretName: {{ include "penstock.secretName" .root | quote }}
    defaultMode: 0400
    items:
      - key: {{ .root.Values.secret.key | quote }}
        path: secret
{{- with (.model | default dict).volume }}
- name: model
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "penstock.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Probes of the processes that have no HTTP. The file is touched once a second by the main loop. */}}
{{- define "penstock.fresh" -}}
test -n "$(find /tmp/penstock-state -newermt '-10 seconds')"
{{- end -}}

{{/* $: a process that has not begun to work by then is started again. Whether it goes on working the
router knows, which hears its beats: it declares lost who is silent or stuck, and that process ends. */}}
{{- define "penstock.stateProbes" -}}
startupProbe:
  exec:
    command: [sh, -c, {{ include "penstock.fresh" . | quote }}]
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: {{ div (add .Values.startupSeconds 1) 2 }}
readinessProbe:
  exec:
    command: [sh, -c, {{ printf "%s && grep -qx ready /tmp/penstock-state" (include "penstock.fresh" .) | quote }}]
  periodSeconds: 5
  timeoutSeconds: 5
{{- end -}}
