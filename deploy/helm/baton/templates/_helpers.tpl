{{- define "baton.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
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

{{/* All Pods of workers, whatever their component. */}}
{{- define "baton.workersSelector" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .Release.Name }}
baton/workers: "true"
{{- end -}}

{{/* The component that answers clients. */}}
{{- define "baton.entry" -}}
{{- ternary "front" "router" (gt (int .Values.fronts.replicas) 0) -}}
{{- end -}}

{{/* Components of workers, with commas. */}}
{{- define "baton.workers" -}}
{{- ternary "prefill,decode" "group" (eq .Values.placement "spread") -}}
{{- end -}}

{{/* Of a list: the root, and a repository. */}}
{{- define "baton.image" -}}
{{- $root := index . 0 -}}
image: {{ printf "%s%s:%s" $root.Values.images.registry (index . 1) (default $root.Chart.AppVersion $root.Values.images.tag) | quote }}
imagePullPolicy: {{ $root.Values.images.pullPolicy }}
{{- end -}}

{{/* Of a list: the root, and a component: metadata of its Pods. A new secret makes new Pods. */}}
{{- define "baton.podMetadata" -}}
{{- $root := index . 0 -}}
labels:
  {{- include "baton.selector" . | nindent 2 }}
  {{- if not (has (index . 1) (list "router" "front")) }}
  baton/workers: "true"
  {{- end }}
  {{- with $root.Values.pods.labels }}{{ toYaml . | nindent 2 }}{{ end }}
annotations:
  checksum/secret: {{ include "baton.secretChecksum" $root }}
  {{- with $root.Values.pods.annotations }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end -}}

{{- define "baton.secretChecksum" -}}
{{- if .Values.secret.existing -}}
{{- $found := lookup "v1" "Secret" .Release.Namespace .Values.secret.existing | default dict -}}
{{- get $found "data" | default dict | toJson | sha256sum -}}
{{- else -}}
{{- required "secret: value or existing" .Values.secret.value | sha256sum -}}
{{- end -}}
{{- end -}}

{{/*
Of a list: the root, and a component's values. Without service links: a variable BATON_ROUTER_PORT of theirs would be
taken for the router's option.
*/}}
{{- define "baton.pod" -}}
{{- $root := index . 0 -}}
{{- $of := index . 1 -}}
enableServiceLinks: false
automountServiceAccountToken: false
{{- /* Workers need 15 s more to end in order: a grace of 5 s for each of workers, memory servers and a kill. */}}
terminationGracePeriodSeconds: {{ add $root.Values.drainSeconds 30 }}
{{- with $root.Values.images.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.pods.priorityClass }}
priorityClassName: {{ . }}
{{- end }}
{{- with $of.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $of.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $of.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "baton.hardened" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{- define "baton.modelArgument" -}}
{{- if not (or .Values.model.claim .Values.model.id) -}}
{{- fail "model: either claim, or id" -}}
{{- end -}}
{{- default "/model" .Values.model.id -}}
{{- end -}}

{{/* Options of a program that answers clients. */}}
{{- define "baton.httpFlags" -}}
- --router-host=0.0.0.0
- --router-drain-s={{ .Values.drainSeconds }}
- --net-secret-file=/run/secrets/baton/secret
{{- include "baton.modelName" . }}
{{- if .Values.apiKeys }}
- --router-api-key-file=/run/secrets/api/keys
{{- end }}
{{- end -}}

{{- define "baton.keysMount" -}}
{{- if .Values.apiKeys -}}
- {name: keys, mountPath: /run/secrets/api, readOnly: true}
{{- end -}}
{{- end -}}

{{- define "baton.keysVolume" -}}
{{- with .Values.apiKeys -}}
- {name: keys, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end -}}
{{- end -}}

{{- define "baton.modelName" -}}
{{- with .Values.model.name }}
- --model-name={{ . }}
{{- end }}
{{- end -}}

{{- define "baton.mounts" -}}
{{- if .Values.model.claim -}}
- {name: model, mountPath: /model, readOnly: true{{ with .Values.model.subPath }}, subPath: {{ . | quote }}{{ end }}}
{{- else -}}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
- {name: secret, mountPath: /run/secrets/baton, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- with .Values.pods.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "baton.volumes" -}}
{{- if .Values.model.claim -}}
- {name: model, persistentVolumeClaim: {claimName: {{ .Values.model.claim }}, readOnly: true}}
{{- else if .Values.model.cacheClaim -}}
- {name: models, persistentVolumeClaim: {claimName: {{ .Values.model.cacheClaim }}}}
{{- else -}}
- {name: models, emptyDir: {}}
{{- end }}
- {name: secret, secret: {secretName: {{ default (include "baton.name" .) .Values.secret.existing }}, defaultMode: 0440}}
- {name: tmp, emptyDir: {}}
{{- with .Values.pods.extraVolumes }}
{{ toYaml . }}
{{- end }}
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
    {{- with .Values.pods.extraEnv }}{{ toYaml . | nindent 6 }}{{ end }}
    {{- include "baton.hardened" . | nindent 4 }}
    volumeMounts:
      - {name: models, mountPath: /models}
      - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end -}}
