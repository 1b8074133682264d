{{/* What the schema cannot say: values that contradict each other. */}}
{{- define "penstock.checks" -}}
{{- $names := dict -}}
{{- range .Values.models -}}
{{- if hasKey $names .name -}}
{{- fail (printf "models: the name %s is given twice" .name) -}}
{{- end -}}
{{- $_ := set $names .name true -}}
{{- if and .volume (not .path) -}}
{{- fail (printf "models: %s has a volume; set path to the model's folder in it" .name) -}}
{{- end -}}
{{- if and .mountPath (not .volume) -}}
{{- fail (printf "models: %s has a mountPath, but no volume" .name) -}}
{{- end -}}
{{- if and .mountPath (not (hasPrefix (printf "%s/" (trimSuffix "/" .mountPath)) (printf "%s/" .path))) -}}
{{- fail (printf "models: %s has the path %s, which is not below its mountPath %s" .name .path .mountPath) -}}
{{- end -}}
{{- $own := mergeOverwrite (deepCopy $.Values.engine) (.engine | default dict) -}}
{{- $settings := include "penstock.settings" (dict "root" $ "model" .) | fromYaml -}}
{{- $traffic := coalesce (get $settings "rank_traffic") (get $settings "rank-traffic") "encrypted" -}}
{{- if and (eq $own.kind "LeaderWorkerSet") (eq $own.device "cuda") (gt (int (include "penstock.workers" $own)) 1) (ne $traffic "plain") -}}
{{- fail (printf "models: %s is divided among GPUs of several pods, and NCCL sends what they compute unencrypted, but settings.rank_traffic is %s; where the pods' network is closed to others, set it to plain" .name $traffic) -}}
{{- end -}}
{{- end -}}
{{- if .Values.keys.insecure -}}
{{- if or .Values.keys.existingSecret .Values.keys.keysFile -}}
{{- fail "keys.insecure: true switches keys off, but keys.existingSecret or keys.keysFile names some" -}}
{{- end -}}
{{- else if .Values.keys.existingSecret -}}
{{- if not (or .Values.keys.apiKeys .Values.keys.keysFile) -}}
{{- fail "keys.existingSecret: which key of it holds the API keys? Name it in keys.apiKeys or keys.keysFile" -}}
{{- end -}}
{{- else if .Values.keys.keysFile -}}
{{- fail "keys.keysFile: which Secret holds that file? Name it in keys.existingSecret" -}}
{{- else if not .Values.keys.apiKeys -}}
{{- fail "keys.apiKeys: under which key shall the Secret hold the API key that is made?" -}}
{{- end -}}
{{- end -}}
