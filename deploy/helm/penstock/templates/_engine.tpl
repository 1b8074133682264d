{{/* An engine's pods. In all of them: (dict "root" $ "model" … "own" …), `own` being the section `engine` with
what the model changes in it. */}}

{{- define "penstock.engineGrace" -}}
{{ add .root.Values.drainTimeoutSeconds 30 }}
{{- end -}}

{{/* The engine's name, the same in its scheduler and its workers and no other engine's. */}}
{{- define "penstock.engineName" -}}
{{- if eq .own.kind "LeaderWorkerSet" -}}
- name: GROUP
  valueFrom:
    fieldRef:
      fieldPath: metadata.labels['leaderworkerset.sigs.k8s.io/group-index']
- name: PENSTOCK_ENGINE
  value: {{ include "penstock.name" (list .root (printf "%s-engine" .model.name)) }}-$(GROUP)
{{- else -}}
- name: PENSTOCK_ENGINE
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
{{- end }}
- name: PENSTOCK_TENSOR_PARALLEL_SIZE
  value: {{ .own.tensorParallelSize | quote }}
- name: PENSTOCK_PIPELINE_PARALLEL_SIZE
  value: {{ .own.pipelineParallelSize | quote }}
{{- end -}}

{{/* Workers of an engine, of its section `engine`. */}}
{{- define "penstock.workers" -}}
{{ mul .tensorParallelSize .pipelineParallelSize }}
{{- end -}}

{{/* Of a pod with "ranks", the workers in it; and "scheduler" true, where it is in it too. */}}
{{- define "penstock.enginePod" -}}
{{- $tmps := list -}}
{{- include "penstock.pod" (dict "root" .root "own" .own "grace" (include "penstock.engineGrace" .)) }}
{{- if .scheduler }}
{{- $tmps = append $tmps "tmp-scheduler" }}
# Sidecars: they begin before the scheduler and end when it has ended, with no request running.
initContainers:
  {{- range $rank := until (int .ranks) }}
  {{- $tmps = append $tmps (printf "tmp-worker-%d" $rank) }}
  {{- include "penstock.worker" (merge (dict "rank" (toString $rank)) $) | nindent 2 }}
    restartPolicy: Always
  {{- end }}
containers:
  - name: scheduler
    image: {{ include "penstock.image" (list .root "scheduler") }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command: [penstock, scheduler]
    env:
      {{- include "penstock.environment" (dict "root" .root "model" .model) | nindent 6 }}
      {{- include "penstock.engineName" . | nindent 6 }}
    {{- include "penstock.stateProbes" .root | nindent 4 }}
    resources:
      {{- toYaml .own.schedulerResources | nindent 6 }}
    securityContext:
      {{- include "penstock.containerSecurity" . | nindent 6 }}
    volumeMounts:
      {{- include "penstock.mounts" (dict "tmp" "tmp-scheduler" "model" .model) | nindent 6 }}
{{- else }}
{{- $tmps = append $tmps "tmp-worker" }}
containers:
  {{- include "penstock.worker" (merge (dict "rank" "") $) | nindent 2 }}
    # Its scheduler is in another pod, and still has requests to end.
    lifecycle:
      preStop:
        exec:
          command: [sleep, {{ .root.Values.drainTimeoutSeconds | quote }}]
{{- end }}
volumes:
  {{- include "penstock.volumes" (dict "root" .root "tmps" $tmps "model" .model) | nindent 2 }}
  - name: shared-memory
    emptyDir: {medium: Memory, sizeLimit: {{ .own.sharedMemory }}}
  - name: kernels
    {{- toYaml .own.kernelCache | nindent 4 }}
{{- end -}}

{{/* One worker; without a "rank" the pod's place in its group is it. */}}
{{- define "penstock.worker" -}}
{{- $name := ternary "worker" (printf "worker-%s" .rank) (eq .rank "") -}}
{{- $cuda := eq .own.device "cuda" -}}
{{- $resources := deepCopy .own.workerResources -}}
{{- if $cuda -}}
{{- $_ := set $resources "limits" (merge (dict .own.gpuResource 1) ($resources.limits | default dict)) -}}
{{- end -}}
- name: {{ $name }}
  image: {{ include "penstock.image" (list .root (.own.workerImage | default (ternary "worker-cuda" "worker-cpu" $cuda))) }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [penstock, worker, --device, {{ .own.device | quote }}]
  env:
    {{- include "penstock.environment" (dict "root" .root "model" .model) | nindent 4 }}
    {{- include "penstock.engineName" . | nindent 4 }}
    - name: PENSTOCK_RANK
      {{- if .rank }}
      value: {{ .rank | quote }}
      {{- else }}
      valueFrom:
        fieldRef:
          fieldPath: metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']
      {{- end }}
  {{- include "penstock.stateProbes" .root | nindent 2 }}
  resources:
    {{- toYaml $resources | nindent 4 }}
  securityContext:
    {{- include "penstock.containerSecurity" . | nindent 4 }}
  volumeMounts:
    {{- include "penstock.mounts" (dict "tmp" (printf "tmp-%s" $name) "model" .model) | nindent 4 }}
    - name: shared-memory
      mountPath: /dev/shm
    - name: kernels
      mountPath: /var/cache/penstock
{{- end -}}
