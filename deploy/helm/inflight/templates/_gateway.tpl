{{- define "inflight.gateway" -}}
{{- $model := .Values.model -}}
- name: gateway
  image: {{ include "inflight.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args:
    - inflight-gateway
    - --host=0.0.0.0
    - --port=9000
    # Its own first.
    - --triton=127.0.0.1:8001
    {{- if .Values.failover.enabled }}
    - --triton={{ include "inflight.peersName" . }}:8001
    {{- end }}
    - --model={{ $model.name }}
    - --workers={{ .Values.gateway.workers }}
    - --exit-timeout={{ include "inflight.exitSeconds" . }}
    {{- if .Values.gateway.apiKeysSecret.name }}
    - --api-key-file=/etc/inflight/api-keys/api-keys
    {{- end }}
    {{- if .Values.endpointPicker.enabled }}
    - --triton-metrics=http://127.0.0.1:8002/metrics
    {{- end }}
    {{- if or .Values.endpointPicker.enabled .Values.gateway.openMetrics }}
    - --open-metrics
    {{- end }}
    - --max-connections={{ int64 .Values.gateway.maxConnections }}
    - --max-bodies-bytes={{ int64 .Values.gateway.maxBodiesBytes }}
    - --header-timeout={{ .Values.gateway.headerTimeout }}
    - --reconnect-timeout={{ .Values.gateway.reconnectTimeout }}
    {{- if .Values.gateway.strict }}
    - --strict
    {{- end }}
    {{- range .Values.gateway.allowedHosts }}
    - --allowed-hosts={{ . }}
    {{- end }}
    {{- range .Values.gateway.extraArgs }}
    - {{ . | quote }}
    {{- end }}
  {{- with .Values.gateway.extraEnv }}
  env:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  ports:
    - {name: openai, containerPort: 9000}
  startupProbe:
    httpGet: {path: /health, port: openai}
    periodSeconds: 2
    failureThreshold: 60
  # Whether a model can serve.
  readinessProbe:
    httpGet: {path: /ready, port: openai}
    periodSeconds: 5
    timeoutSeconds: 5
    failureThreshold: 2
  # Whether the gateway answers, with or without Triton: open streams wait for one that restarts.
  livenessProbe:
    httpGet: {path: /health, port: openai}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 3
  lifecycle:
    # On SIGTERM the gateway takes no more connections, and ends with its last request.
    preStop:
      exec: {command: [sleep, "{{ .Values.drain.endpointSeconds }}"]}
  resources:
    {{- toYaml .Values.gateway.resources | nindent 4 }}
  securityContext:
    {{- toYaml .Values.securityContext | nindent 4 }}
  volumeMounts:
    - {name: gateway-tmp, mountPath: /tmp}
    {{- if .Values.gateway.apiKeysSecret.name }}
    - {name: api-keys, mountPath: /etc/inflight/api-keys, readOnly: true}
    {{- end }}
{{- end }}
