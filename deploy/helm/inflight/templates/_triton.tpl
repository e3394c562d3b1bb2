{{- define "inflight.triton" -}}
{{- $model := .Values.model -}}
- name: triton
  image: {{ include "inflight.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  # No model control: the repository is what this chart says.
  args:
    - inflight-tritonserver
    - --model-repository=/repository
    - --model-control-mode=none
    - --http-port=8000
    - --grpc-port=8001
    - --grpc-address={{ ternary "0.0.0.0" "127.0.0.1" (or .Values.service.grpc.enabled (ne (include "inflight.tritonIsShared" .) "")) }}
    {{- if or .slug .decode }}
    # Gateways look for new replicas when a connection ends; open streams stay.  Milliseconds.
    - --grpc-max-connection-age=60000
    {{- end }}
    - --metrics-port=8002
    - --exit-timeout-secs={{ include "inflight.exitSeconds" . }}
    {{- range .Values.server.extraArgs }}
    - {{ . | quote }}
    {{- end }}
  env:
    # The gateway is a container of its own.
    - name: INFLIGHT_OPENAI_PORT
      value: ""
    {{- with .Values.server.adminKeySecret }}
    {{- if .name }}
    - name: INFLIGHT_ADMIN_KEY
      valueFrom:
        secretKeyRef: {name: {{ .name }}, key: {{ .key }}}
    {{- end }}
    {{- end }}
    {{- if eq $model.source "hub" }}
    {{- with $model.hub.tokenSecret }}
    {{- if .name }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef: {name: {{ .name }}, key: {{ .key }}}
    {{- end }}
    {{- end }}
    {{- else }}
    - name: HF_HUB_OFFLINE
      value: "1"
    {{- end }}
    {{- if not (or .Values.cache.existingClaim .Values.cache.perReplica) }}
    # Packed weights beside the checkpoint could exceed the emptyDir's limit, and the pod would be evicted.
    - name: INFLIGHT_CACHE
      value: "off"
    {{- end }}
    {{- with .Values.server.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .Values.server.envFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  ports:
    - {name: http, containerPort: 8000}
    {{- if or .Values.service.grpc.enabled (include "inflight.tritonIsShared" .) }}
    - {name: grpc, containerPort: 8001}
    {{- end }}
    - {name: metrics, containerPort: 8002}
    {{- if .decode }}
    - {name: kv, containerPort: {{ .Values.prefill.port }}}
    {{- end }}
  # Triton opens its ports once the model is loaded.
  startupProbe:
    httpGet: {path: "/v2/models/{{ $model.name }}/ready", port: http}
    periodSeconds: 5
    timeoutSeconds: 5
    failureThreshold: {{ div (add .Values.probes.startupSeconds 4) 5 }}
  # Whether an engine can serve and no drain has begun.
  readinessProbe:
    httpGet: {path: "/v2/models/{{ $model.name }}/ready", port: http}
    periodSeconds: 5
    timeoutSeconds: 5
    failureThreshold: 2
  # Whether Triton and the model's stub answer: both are beyond help.  An engine that restarts is not.
  livenessProbe:
    exec: {command: [inflight-alive, {{ $model.name | quote }}]}
    periodSeconds: 20
    timeoutSeconds: 12
    failureThreshold: {{ max 1 (div (int .Values.probes.stubSeconds) 20) }}
  lifecycle:
    preStop:
      exec: {command: [sh, -c, "sleep {{ .Values.drain.endpointSeconds }}; exec inflight-drain {{ include "inflight.exitSeconds" . }}"]}
  resources:
    {{- $resources := deepCopy .Values.server.resources }}
    {{- if .Values.server.gpus }}
    {{- $limits := merge (dict .Values.server.gpuResource .Values.server.gpus) ($resources.limits | default dict) }}
    {{- $_ := set $resources "limits" $limits }}
    {{- end }}
    {{- toYaml $resources | nindent 4 }}
  securityContext:
    {{- toYaml .Values.securityContext | nindent 4 }}
  volumeMounts:
    # With subPath these are files; without they would be links, and Triton takes the folders that they point to
    # for models.
    - {name: model, mountPath: "/repository/{{ $model.name }}/config.pbtxt", subPath: config.pbtxt, readOnly: true}
    - {name: model, mountPath: "/repository/{{ $model.name }}/1/model.json", subPath: model.json, readOnly: true}
    {{- if include "inflight.hasAdapters" . }}
    - {name: model, mountPath: "/repository/{{ $model.name }}/1/multi_lora.json", subPath: multi_lora.json, readOnly: true}
    {{- end }}
    - {name: cache, mountPath: /var/cache/inflight}
    {{- if or .Values.kv.size .Values.kv.existingClaim }}
    - {name: kv, mountPath: /var/lib/inflight-kv}
    {{- end }}
    {{- if .Values.kv.secret.name }}
    - {name: kv-secret, mountPath: /etc/inflight-kv, readOnly: true}
    {{- end }}
    - {name: shm, mountPath: /dev/shm}
    - {name: triton-tmp, mountPath: /tmp}
    {{- if or (eq $model.source "pvc") (eq $model.source "image") }}
    - {name: checkpoint, mountPath: /checkpoint, readOnly: true}
    {{- end }}
    {{- with .Values.server.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
