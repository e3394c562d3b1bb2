{{/* The gateway beside a Triton. */}}
{{- define "inflight.gateway" -}}
- name: gateway
  {{- include "inflight.gatewayProgram" . | nindent 2 }}
  args:
    - inflight-gateway
    # Its own first.
    - --triton=127.0.0.1:8001
    {{- if .Values.failover.enabled }}
    - --triton={{ include "inflight.peersName" . }}:8001
    {{- end }}
    - --model={{ .Values.model.name }}
    {{- with .Values.prefill }}
    {{- if .replicas }}
    - --prefill-triton={{ include "inflight.peersHost" $ }}.{{ include "inflight.fullname" $ }}-prefill:8001
    {{- if kindIs "string" .handover }}
    - --handover={{ .handover }}
    {{- else if kindIs "bool" .handover }}
    - --handover=off
    {{- else }}
    - --handover={{ int64 .handover }}
    {{- end }}
    {{- end }}
    {{- end }}
    {{- if .Values.endpointPicker.enabled }}
    - --triton-metrics=http://127.0.0.1:8002/metrics
    {{- end }}
    {{- include "inflight.gatewayArgs" . | nindent 4 }}
{{- end }}

{{/* The options that all gateways of a release share. */}}
{{- define "inflight.gatewayArgs" -}}
{{- with .Values.gateway -}}
- --host=0.0.0.0
- --port=9000
- --workers={{ .workers }}
- --exit-timeout={{ include "inflight.exitSeconds" $ }}
{{- if .apiKeysSecret.name }}
- --api-key-file=/etc/inflight/api-keys/api-keys
{{- end }}
{{- if .tls.secretName }}
- --ssl-certfile=/etc/inflight/tls/tls.crt
- --ssl-keyfile=/etc/inflight/tls/tls.key
{{- end }}
{{- if or $.Values.endpointPicker.enabled .openMetrics }}
- --open-metrics
{{- end }}
- --max-connections={{ int64 .maxConnections }}
- --max-bodies-bytes={{ int64 .maxBodiesBytes }}
- --header-timeout={{ .headerTimeout }}
- --reconnect-timeout={{ .reconnectTimeout }}
{{- if .strict }}
- --strict
{{- end }}
{{- range .allowedHosts }}
- --allowed-hosts={{ . }}
{{- end }}
{{- range .extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* All of a gateway's container but its name and arguments. */}}
{{- define "inflight.gatewayProgram" -}}
{{- $scheme := include "inflight.scheme" . | upper -}}
image: {{ include "inflight.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- with .Values.gateway.extraEnv }}
env:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.gateway.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
ports:
  - {name: openai, containerPort: 9000}
startupProbe:
  httpGet: {path: /health, port: openai, scheme: {{ $scheme }}}
  periodSeconds: 2
  failureThreshold: 60
# Whether a model can serve.
readinessProbe:
  httpGet: {path: /ready, port: openai, scheme: {{ $scheme }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
# Whether the gateway answers, with or without Triton: open streams wait for one that restarts.
livenessProbe:
  httpGet: {path: /health, port: openai, scheme: {{ $scheme }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
lifecycle:
  # On SIGTERM the gateway takes no more connections, and ends with its last request.
  preStop:
    exec: {command: [sleep, "{{ .Values.drain.endpointSeconds }}"]}
resources:
  {{- toYaml .Values.gateway.resources | nindent 2 }}
securityContext:
  {{- toYaml .Values.securityContext | nindent 2 }}
volumeMounts:
  - {name: gateway-tmp, mountPath: /tmp}
  {{- if .Values.gateway.apiKeysSecret.name }}
  - {name: api-keys, mountPath: /etc/inflight/api-keys, readOnly: true}
  {{- end }}
  {{- if .Values.gateway.tls.secretName }}
  - {name: gateway-tls, mountPath: /etc/inflight/tls, readOnly: true}
  {{- end }}
  {{- with .Values.gateway.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "inflight.gatewayVolumes" -}}
- name: gateway-tmp
  emptyDir: {sizeLimit: 256Mi}
{{- with .Values.gateway.apiKeysSecret }}
{{- if .name }}
- name: api-keys
  secret:
    secretName: {{ .name }}
    defaultMode: 0440
    items: [{key: {{ .key }}, path: api-keys}]
{{- end }}
{{- end }}
{{- with .Values.gateway.tls.secretName }}
- name: gateway-tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end }}
