{{- define "baton.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* On the node; two namespaces may have releases of one name. */}}
{{- define "baton.directory" -}}
{{- printf "%s/%s-%s" .Values.memory.directory .Release.Namespace (include "baton.name" .) -}}
{{- end -}}

{{- define "baton.labels" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* Of a list: the root, and a component. */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Of a list: the root, and a repository. */}}
{{- define "baton.image" -}}
{{- $root := index . 0 -}}
image: {{ printf "%s%s:%s" $root.Values.images.registry (index . 1) (default $root.Chart.AppVersion $root.Values.images.tag) | quote }}
imagePullPolicy: {{ $root.Values.images.pullPolicy }}
{{- end -}}

{{- define "baton.workerImage" -}}
{{- include "baton.image" (list . (ternary .Values.images.workerGpu .Values.images.workerCpu .Values.gpu.enabled)) -}}
{{- end -}}

{{/* Without service links: a variable BATON_ROUTER_PORT of theirs would be taken for the router's option. */}}
{{- define "baton.pod" -}}
enableServiceLinks: false
automountServiceAccountToken: false
{{- with .Values.images.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* CUDA IPC needs process ids that differ between pods: hence the node's, on GPUs only. */}}
{{- define "baton.onNode" -}}
nodeSelector:
  kubernetes.io/hostname: {{ required "node: the kubernetes.io/hostname of the node with the GPUs" .Values.node | quote }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- if .Values.gpu.enabled }}
hostPID: true
{{- with .Values.gpu.runtimeClass }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "baton.hardened" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* All GPUs for whoever shares them: Kubernetes would give each to one container alone. */}}
{{- define "baton.gpuEnv" -}}
{{- if .Values.gpu.enabled }}
- {name: NVIDIA_VISIBLE_DEVICES, value: all}
- {name: NVIDIA_DRIVER_CAPABILITIES, value: "compute,utility"}
- {name: CUDA_DEVICE_ORDER, value: PCI_BUS_ID}
- {name: CUDA_MPS_PIPE_DIRECTORY, value: /run/memory/mps}
{{- end }}
{{- end -}}

{{- define "baton.usedGpus" -}}
{{- if .Values.gpu.enabled }}
- {name: CUDA_VISIBLE_DEVICES, value: {{ .Values.gpu.devices | quote }}}
{{- end }}
{{- end -}}

{{- define "baton.link" -}}
- --net-router-endpoint=tcp://{{ include "baton.name" . }}-internal:5570
- --net-secret-file=/run/secrets/baton/secret
{{- end -}}

{{- define "baton.modelArgument" -}}
{{- if and (not .Values.model.claim) (not (and .Values.model.id .Values.model.cacheClaim)) -}}
{{- fail "model: either claim, or id and cacheClaim" -}}
{{- end -}}
{{- default "/model" .Values.model.id -}}
{{- end -}}

{{- define "baton.modelName" -}}
{{- with .Values.model.name }}
- --model-name={{ . }}
{{- end }}
{{- end -}}

{{- define "baton.modelMounts" -}}
{{- if .Values.model.claim -}}
- {name: model, mountPath: /model, readOnly: true{{ with .Values.model.subPath }}, subPath: {{ . | quote }}{{ end }}}
{{- else -}}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
- {name: secret, mountPath: /run/secrets/baton, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- end -}}

{{- define "baton.modelVolumes" -}}
{{- if .Values.model.claim -}}
- {name: model, persistentVolumeClaim: {claimName: {{ .Values.model.claim }}, readOnly: true}}
{{- else -}}
- {name: models, persistentVolumeClaim: {claimName: {{ .Values.model.cacheClaim }}}}
{{- end }}
{{ include "baton.secretVolume" . }}
{{- end -}}

{{- define "baton.secretVolume" -}}
- {name: secret, secret: {secretName: {{ default (include "baton.name" .) .Values.secret.existing }}, defaultMode: 0440}}
- {name: tmp, emptyDir: {}}
{{- end -}}

{{/* Ends when the model is there; the others have it without a way to the Hub. */}}
{{- define "baton.download" -}}
{{- if not .Values.model.claim }}
initContainers:
  - name: model
    {{- include "baton.image" (list . .Values.images.router) | nindent 4 }}
    command: [python, -P, -m, deploy.containers.container, model, {{ .Values.model.id | quote }}]
    env:
      - {name: HF_HOME, value: /models/home}
    {{- with .Values.model.tokenSecret }}
      - name: HF_TOKEN
        valueFrom: {secretKeyRef: {name: {{ . }}, key: HF_TOKEN}}
    {{- end }}
    {{- include "baton.hardened" . | nindent 4 }}
    volumeMounts:
      - {name: models, mountPath: /models}
      - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end -}}
