{{- define "inflight.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Of the release, and of a model if the release has several: with what is appended, at most 63 characters. */}}
{{- define "inflight.fullname" -}}
{{- $length := ternary 28 40 (hasKey . "slug") }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc $length | trimSuffix "-" }}
{{- else if contains (include "inflight.name" .) .Release.Name }}
{{- .Release.Name | trunc $length | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "inflight.name" .) | trunc $length | trimSuffix "-" }}
{{- end }}
{{- with .slug }}-{{ . }}{{ end }}
{{- if .decode }}-prefill{{ end }}
{{- end }}

{{/* A model's name as a part of names and labels. */}}
{{- define "inflight.slug" -}}
{{- regexReplaceAll "[^a-z0-9]+" (lower .) "-" | trimAll "-" | trunc 16 | trimSuffix "-" }}
{{- end }}

{{/* A template, by name, for each model of the release: `models` if it has any, else `model`.
     Its context is as the release's; with `models` it has the values of the model, and `slug`. */}}
{{- define "inflight.each" -}}
{{- $root := index . 0 }}
{{- $template := index . 1 }}
{{- if $root.Values.models }}
{{- range $root.Values.models }}
{{- $values := mergeOverwrite (deepCopy (omit $root.Values "models")) (deepCopy .) }}
---
{{ include $template (dict "Values" $values "Chart" $root.Chart "Release" $root.Release "Files" $root.Files "slug" (include "inflight.slug" $values.model.name)) }}
{{- end }}
{{- else }}
{{ include $template $root }}
{{- end }}
{{- end }}

{{/* Which release: in every selector, so it must never change. */}}
{{- define "inflight.release" -}}
app.kubernetes.io/name: {{ include "inflight.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "inflight.selector" -}}
{{ include "inflight.release" . }}
app.kubernetes.io/component: {{ ternary "prefill" "server" (hasKey . "decode") }}
{{- with .slug }}
inflight-model: {{ . }}
{{- end }}
{{- end }}

{{/* The gateway in front of several models. */}}
{{- define "inflight.frontSelector" -}}
{{ include "inflight.release" . }}
app.kubernetes.io/component: gateway
{{- end }}

{{- define "inflight.pickerSelector" -}}
{{ include "inflight.release" . }}
app.kubernetes.io/component: endpoint-picker
{{- end }}

{{/* The pod of `helm test`. */}}
{{- define "inflight.testSelector" -}}
{{ include "inflight.release" . }}
app.kubernetes.io/component: test
{{- end }}

{{/* For what is not part of a pod: these change with each version of the chart, and a changed pod template restarts all pods. */}}
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

{{/* Not empty: the model has a multi_lora.json. */}}
{{- define "inflight.hasAdapters" -}}
{{- if or .Values.model.adapters (eq (toString .Values.model.settings.enable_lora) "true") }}yes{{ end }}
{{- end }}

{{- define "inflight.modelJson" -}}
{{- $own := dict "model" (include "inflight.checkpoint" .) "drain_timeout" .Values.drain.seconds }}
{{- if and (eq .Values.model.source "hub") .Values.model.hub.revision }}
{{- $_ := set $own "revision" .Values.model.hub.revision }}
{{- end }}
{{- if .Values.kv.secret.name }}
{{- $_ := set $own "kv_store_secret_file" "/etc/inflight-kv/secret" }}
{{- end }}
{{- $from := dict "drain_timeout" "drain.seconds" "kv_store_secret_file" "kv.secret" }}
{{- if and .Values.model.adapters (not (hasKey .Values.model.settings "enable_lora")) }}
{{- $_ := set $own "enable_lora" true }}
{{- end }}
{{- range $key, $_ := .Values.model.settings }}
{{- if hasKey $own $key }}
{{- fail (printf "model.settings.%s: the chart sets this key, from %s" $key (get $from $key | default "model.source")) }}
{{- end }}
{{- end }}
{{- merge $own (include "inflight.kvSettings" . | fromJson) | toPrettyJson }}
{{- end }}

{{/* model.settings, with the tiers through which the pods for prompts give KV to the others. */}}
{{- define "inflight.kvSettings" -}}
{{- $settings := deepCopy .Values.model.settings }}
{{- $tiers := $settings.kv_tiers | default list }}
{{- with .Values.prefill }}
{{- if $.decode }}
{{- if hasKey .settings "kv_cache_memory" }}
{{- $settings = omit $settings "kv_cache_memory_bytes" }}
{{- end }}
{{- $settings = mergeOverwrite $settings (deepCopy .settings) }}
{{- $_ := set $settings "kv_listen" (printf "0.0.0.0:%d" (int .port)) }}
{{- $types := list }}
{{- range $tiers }}
{{- $types = append $types .type }}
{{- end }}
{{- if not (has "host" $types) }}
{{- $tiers = prepend $tiers (dict "type" "host" "size" .kvSize) }}
{{- end }}
{{- else if .replicas }}
{{- $tiers = append $tiers (dict "type" "peer" "url" (printf "tcp://%s-prefill:%d" (include "inflight.fullname" $) (int .port))) }}
{{- end }}
{{- end }}
{{- if $tiers }}
{{- $_ := set $settings "kv_tiers" $tiers }}
{{- end }}
{{- toJson $settings }}
{{- end }}

{{/* Equal for pods that give the same answers: they may go on with each other's streams. */}}
{{- define "inflight.peers" -}}
{{- if .decode }}
{{- include "inflight.peers" .decode }}
{{- else }}
{{- $adapters := ternary (toJson .Values.model.adapters) "" (not (empty .Values.model.adapters)) }}
{{- printf "%s %s%s" (include "inflight.modelJson" .) (include "inflight.image" .) $adapters | sha256sum | trunc 8 }}
{{- end }}
{{- end }}

{{/* The host name of such pods of a Deployment: a part of their address behind the headless Service, whose name stays. */}}
{{- define "inflight.peersHost" -}}
v{{ include "inflight.peers" . }}
{{- end }}

{{- define "inflight.tritonName" -}}
{{- printf "%s-triton" (include "inflight.fullname" .) }}
{{- end }}

{{/* Where gateways find their peers.  A StatefulSet names its pods itself, so there each version has a Service.
     Not with the domain of the namespace: /etc/hosts has that name, for the pod alone. */}}
{{- define "inflight.peersName" -}}
{{- if eq .Values.workload.kind "Deployment" }}
{{- printf "%s.%s" (include "inflight.peersHost" .) (include "inflight.tritonName" .) }}
{{- else }}
{{- printf "%s-%s" (include "inflight.tritonName" .) (include "inflight.peers" .) }}
{{- end }}
{{- end }}

{{/* Whether gateways of other pods reach Triton. */}}
{{- define "inflight.tritonIsShared" -}}
{{- if or .Values.failover.enabled .slug .decode }}true{{ end }}
{{- end }}

{{/* With hard rules a new pod may find no node while the old ones run, so an old one goes first. */}}
{{- define "inflight.ruleIsHard" -}}
{{- if and (not .Values.scheduling.affinity) (eq .Values.scheduling.antiAffinity "hard") }}true{{ end }}
{{- if and (not .Values.scheduling.topologySpreadConstraints) (eq .Values.scheduling.spreadZones "hard") }}true{{ end }}
{{- end }}

{{- define "inflight.maxSurge" -}}
{{- $given := toString .Values.workload.maxSurge }}
{{- if ne $given "" }}{{ $given }}{{ else }}{{ ternary 0 1 (ne (include "inflight.ruleIsHard" .) "") }}{{ end }}
{{- end }}

{{- define "inflight.maxUnavailable" -}}
{{- $given := toString .Values.workload.maxUnavailable }}
{{- if ne $given "" }}{{ $given }}{{ else }}{{ ternary 1 0 (eq (include "inflight.maxSurge" .) "0") }}{{ end }}
{{- end }}

{{/* How clients and probes reach the gateway. */}}
{{- define "inflight.scheme" -}}
{{- ternary "https" "http" (ne .Values.gateway.tls.secretName "") }}
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
{{- if and $v.kv.size $v.kv.existingClaim }}
{{- fail "kv.size and kv.existingClaim: choose one" }}
{{- end }}
{{- if and (eq $v.workload.kind "Deployment") (has (include "inflight.maxSurge" .) (list "0" "0%")) (has (include "inflight.maxUnavailable" .) (list "0" "0%")) }}
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
{{- if and $v.ingress.enabled $v.ingress.tls (not $v.ingress.hosts) }}
{{- fail "ingress.tls: ingress.hosts names no host that the certificate could be for" }}
{{- end }}
{{- if and $v.endpointPicker.enabled $v.gateway.tls.secretName }}
{{- fail "endpointPicker.enabled and gateway.tls.secretName: inference gateways speak plain HTTP to the pods; let the Gateway terminate TLS" }}
{{- end }}
{{- if and $v.endpointPicker.enabled .slug }}
{{- fail "endpointPicker.enabled and models: a picker chooses among replicas of one model; install a release for each" }}
{{- end }}
{{- include "inflight.checkPrefill" . }}
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

{{/* Keys of model.json that may differ in pods for prompts: of scheduling, memory and queues.  They change neither answers nor KV. */}}
{{- define "inflight.prefillKeys" -}}
admission async_scheduling cpu_threads gpu_memory_utilization itl_target_ms kv_cache_memory
long_prefill_token_threshold max_long_partial_prefills max_num_batched_tokens max_num_partial_prefills
max_num_seqs max_queue_size num_gpu_blocks_override preemption_mode preemption_victim priority_classes
scheduling_policy shared_step_rows shed_on_predicted_wait short_prompt_share swap_space tenants watermark
{{- end }}

{{/* Pods for prompts that could give no KV to the others. */}}
{{- define "inflight.checkPrefill" -}}
{{- $v := .Values }}
{{- if and $v.prefill.replicas (not .decode) }}
{{- if not $v.kv.secret.name }}
{{- fail "prefill.replicas: KV crosses the network, so kv.secret.name must name a Secret; make it with: kubectl create secret generic NAME --from-literal=kv-secret=$(openssl rand -hex 32)" }}
{{- end }}
{{- if hasKey $v.model.settings "kv_listen" }}
{{- fail "model.settings.kv_listen: prefill.replicas sets this key, in the pods for prompts, from prefill.port" }}
{{- end }}
{{- if eq (toString $v.model.settings.enable_prefix_caching) "false" }}
{{- fail "model.settings.enable_prefix_caching=false: no request would use the KV of prefill.replicas; leave it out" }}
{{- end }}
{{- if hasKey $v.model.settings "kv_offloading_size" }}
{{- fail "model.settings.kv_offloading_size: prefill.replicas adds to kv_tiers, which is the same option; write kv_tiers: [{type: host, size: 4GiB}] instead" }}
{{- end }}
{{- $canDiffer := regexSplit "\\s+" (include "inflight.prefillKeys" .) -1 }}
{{- range $key, $_ := $v.prefill.settings }}
{{- if has $key (list "drain_timeout" "enable_lora" "kv_listen" "kv_offloading_size" "kv_store_secret_file" "kv_tiers" "model" "revision") }}
{{- fail (printf "prefill.settings.%s: the chart sets this key, or it is in model.settings for all pods; see prefill.kvSize and prefill.port" $key) }}
{{- else if not (has $key $canDiffer) }}
{{- fail (printf "prefill.settings.%s: the pods for prompts need the same as the others, or answers change or their KV is not read; set it in model.settings. These can differ: %s" $key (join ", " $canDiffer)) }}
{{- end }}
{{- end }}
{{- $gpus := int $v.server.gpus }}
{{- $promptGpus := ternary (int $v.prefill.server.gpus) $gpus (hasKey $v.prefill.server "gpus") }}
{{- if ne (eq $gpus 0) (eq $promptGpus 0) }}
{{- fail (printf "prefill.server.gpus=%d with server.gpus=%d: KV of a GPU is not read on a CPU, nor the other way round; give both kinds of pods GPUs, or neither" $promptGpus $gpus) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Values of the release whose models contradict each other. */}}
{{- define "inflight.checkModels" -}}
{{- $seen := dict }}
{{- if and .Values.models .Values.prefill.replicas }}
{{- fail "prefill.replicas and models: the gateways in front of several models do not know which pods compute whose prompts; install a release for each model" }}
{{- end }}
{{- range .Values.models }}
{{- $slug := include "inflight.slug" .model.name }}
{{- if not $slug }}
{{- fail (printf "models: the name %q has no letter or digit" .model.name) }}
{{- end }}
{{- if has $slug (list "gateway" "model" "pods" "test" "triton") }}
{{- fail (printf "models: the chart calls other things %q; choose another name than %q" $slug .model.name) }}
{{- end }}
{{- if hasKey $seen $slug }}
{{- fail (printf "models: the names %q and %q both become %q in names of Kubernetes; choose names that differ in their first 16 letters and digits" (get $seen $slug) .model.name $slug) }}
{{- end }}
{{- $_ := set $seen $slug .model.name }}
{{- end }}
{{- end }}
