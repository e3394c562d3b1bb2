{{- define "inflight.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "inflight.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "inflight.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "inflight.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Which release: in every selector, so it must never change. */}}
{{- define "inflight.release" -}}
app.kubernetes.io/name: {{ include "inflight.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "inflight.selector" -}}
{{ include "inflight.release" . }}
app.kubernetes.io/component: server
{{- end }}

{{- define "inflight.pickerSelector" -}}
{{ include "inflight.release" . }}
app.kubernetes.io/component: endpoint-picker
{{- end }}

{{- define "inflight.labels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: inflight
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "inflight.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "inflight.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "inflight.image" -}}
{{- with .Values.image }}
{{- if .digest }}
{{- printf "%s@%s" .repository .digest }}
{{- else }}
{{- printf "%s:%s" .repository (default $.Chart.AppVersion .tag) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Seconds that a server may take beyond drain.seconds to notice that nothing is open. */}}
{{- define "inflight.exitSeconds" -}}
{{- add .Values.drain.seconds 5 }}
{{- end }}

{{/* preStop, then the drain, then 15 s for processes to end and volumes to be left. */}}
{{- define "inflight.graceSeconds" -}}
{{- $needed := add .Values.drain.endpointSeconds (include "inflight.exitSeconds" . | int) 15 }}
{{- $given := int .Values.terminationGracePeriodSeconds }}
{{- if and $given (lt $given (int $needed)) }}
{{- fail (printf "terminationGracePeriodSeconds=%d: drain.endpointSeconds=%d and drain.seconds=%d need at least %d; leave it 0 to derive it" $given (int .Values.drain.endpointSeconds) (int .Values.drain.seconds) (int $needed)) }}
{{- end }}
{{- max $given $needed }}
{{- end }}

{{/* What model.json calls the checkpoint. */}}
{{- define "inflight.checkpoint" -}}
{{- $model := .Values.model }}
{{- if eq $model.source "hub" }}
{{- required "model.hub.id: the id of a checkpoint is needed, such as Qwen/Qwen2.5-0.5B-Instruct" $model.hub.id }}
{{- else if eq $model.source "builtin" }}
{{- $model.builtin.path }}
{{- else if eq $model.source "pvc" }}
{{- printf "/checkpoint/%s" $model.pvc.path | trimSuffix "/" }}
{{- else }}
{{- printf "/checkpoint/%s" $model.image.path | trimSuffix "/" }}
{{- end }}
{{- end }}

{{- define "inflight.modelJson" -}}
{{- $own := dict "model" (include "inflight.checkpoint" .) "drain_timeout" .Values.drain.seconds }}
{{- if and (eq .Values.model.source "hub") .Values.model.hub.revision }}
{{- $_ := set $own "revision" .Values.model.hub.revision }}
{{- end }}
{{- range $key, $_ := .Values.model.settings }}
{{- if hasKey $own $key }}
{{- fail (printf "model.settings.%s: the chart sets this key, from %s" $key (ternary "drain.seconds" "model.source" (eq $key "drain_timeout"))) }}
{{- end }}
{{- end }}
{{- merge $own .Values.model.settings | toPrettyJson }}
{{- end }}

{{/* Equal for pods that give the same answers: they may go on with each other's streams. */}}
{{- define "inflight.peers" -}}
{{- printf "%s %s" (include "inflight.modelJson" .) (include "inflight.image" .) | sha256sum | trunc 8 }}
{{- end }}

{{- define "inflight.peersName" -}}
{{- printf "%s-triton-%s" (include "inflight.fullname" .) (include "inflight.peers" .) }}
{{- end }}

{{/* Fewest replicas that may run. */}}
{{- define "inflight.minReplicas" -}}
{{- ternary .Values.autoscaling.minReplicas .Values.replicaCount .Values.autoscaling.enabled }}
{{- end }}

{{/* Values that contradict each other, which a schema cannot say. */}}
{{- define "inflight.check" -}}
{{- $v := .Values }}
{{- if and $v.autoscaling.enabled (gt (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas)) }}
{{- fail (printf "autoscaling.minReplicas=%d is above autoscaling.maxReplicas=%d" (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas)) }}
{{- end }}
{{- if and $v.cache.perReplica (ne $v.workload.kind "StatefulSet") }}
{{- fail "cache.perReplica: only workload.kind=StatefulSet makes a claim for each replica" }}
{{- end }}
{{- if and $v.cache.perReplica $v.cache.existingClaim }}
{{- fail "cache.perReplica and cache.existingClaim: choose one" }}
{{- end }}
{{- if and (eq $v.workload.kind "Deployment") (eq (toString $v.workload.maxSurge) "0") (eq (toString $v.workload.maxUnavailable) "0") }}
{{- fail "workload.maxSurge and workload.maxUnavailable are both 0: a rollout could not begin" }}
{{- end }}
{{- if and (eq $v.model.source "pvc") (not $v.model.pvc.claimName) }}
{{- fail "model.source=pvc: model.pvc.claimName is needed" }}
{{- end }}
{{- if and (eq $v.model.source "image") (not $v.model.image.reference) }}
{{- fail "model.source=image: model.image.reference is needed" }}
{{- end }}
{{- if and $v.httpRoute.enabled (not $v.httpRoute.parentRefs) }}
{{- fail "httpRoute.enabled: httpRoute.parentRefs names no Gateway" }}
{{- end }}
{{- $budget := $v.podDisruptionBudget }}
{{- $unset := list "" "<nil>" }}
{{- if $budget.enabled }}
{{- $max := toString $budget.maxUnavailable }}
{{- $min := toString $budget.minAvailable }}
{{- if eq (has $max $unset) (has $min $unset) }}
{{- fail "podDisruptionBudget: set one of maxUnavailable and minAvailable, and the other one to \"\"" }}
{{- end }}
{{- if and (not (has $min $unset)) (not (hasSuffix "%" $min)) (ge (int $min) (int (include "inflight.minReplicas" .))) }}
{{- fail (printf "podDisruptionBudget.minAvailable=%s with %s replicas: no node could be drained" $min (include "inflight.minReplicas" .)) }}
{{- end }}
{{- if or (eq $max "0") (eq $max "0%") (eq $min "100%") }}
{{- fail "podDisruptionBudget: no node could be drained; allow one replica to leave, or set enabled to false" }}
{{- end }}
{{- end }}
{{- end }}
