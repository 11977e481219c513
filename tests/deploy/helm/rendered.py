"""The chart as helm renders it, kept in files, because few machines have helm.

    python -m tests.deploy.helm.rendered       # with helm on PATH: render anew.

A file begins with the digest of the chart that it was rendered from.
"""

import hashlib
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

CHART = Path(__file__).parents[3] / "deploy" / "helm" / "baton"
RENDERED = Path(__file__).parent / "baton"
SECRET = "0123456789abcdef0123456789abcdef"
NEEDED = ("model.claim=models", f"secret.value={SECRET}")
SPREAD = (*NEEDED, "placement=spread", "gpu.enabled=false")
OPTIONAL = (
    "autoscaling.enabled=true", "autoscaling.prometheus=http://prometheus:9090", "serviceMonitor.enabled=true",
    "serviceMonitor.labels.release=prometheus", "model.name=a name", "model.subPath=models--owner--name",
    "images.pullSecrets[0].name=registry", "router.service.type=LoadBalancer", "apiKeys=keys", "ingress.enabled=true",
    "ingress.className=nginx", "ingress.host=chat.example.com", "ingress.tlsSecret=tls", "ingress.annotations.a=b",
    "httpRoute.enabled=true", "httpRoute.parents[0].name=gateway", "httpRoute.hostnames[0]=chat.example.com",
    "networkPolicy.clients[0].namespaceSelector.matchLabels.name=entry", "pods.priorityClass=high",
    "networkPolicy.egress[0].ports[0].port=4318", "pods.annotations.a=b", "pods.labels.team=chat",
    "pods.extraEnv[0].name=UCX_NET_DEVICES", "pods.extraEnv[0].value=eth0", "pods.extraVolumes[0].name=traces",
    "pods.extraVolumes[0].emptyDir.sizeLimit=1Gi", "pods.extraVolumeMounts[0].name=traces",
    "pods.extraVolumeMounts[0].mountPath=/traces", "decode.nodeSelector.pool=decode", "router.nodeSelector.pool=router",
    "fronts.replicas=3", "fronts.dispatcherPort=6001", "fronts.nodeSelector.pool=front",
)  # fmt: skip
VALUES = {
    "node": NEEDED,
    "spread": SPREAD,
    "gpus": (*NEEDED, "placement=spread", "prefill.replicas=2", "fronts.replicas=2"),
    "everything": SPREAD + OPTIONAL,
    "groups": (
        *NEEDED, *OPTIONAL, "gpu.count=2", "gpu.claimTemplate=two-gpus", "gpu.runtimeClass=nvidia", "gpu.mps=false",
        "group.prefill=2", "group.decode=3", "group.replicas=4",
    ),
    "hub": (
        "gpu.enabled=false", "model.id=owner/name", "model.cacheClaim=cache", "model.tokenSecret=hub",
        "secret.existing=mine", "networkPolicy.enabled=false", "disruptionBudgets=false",
        "inferencePool.enabled=true", "inferencePool.existing=theirs", "httpRoute.enabled=true",
        "httpRoute.parents[0].name=gateway",
    ),
    "picked": (
        *NEEDED, "inferencePool.enabled=true", "inferencePool.picker.service=picker", "inferencePool.labels.pool=chat",
        "inferencePool.picker.failureMode=FailOpen", "pods.labels.pool=chat", "httpRoute.enabled=true",
        "httpRoute.parents[0].name=gateway",
    ),
    "each": ("gpu.enabled=false", "model.id=owner/name", f"secret.value={SECRET}", "startSeconds=3605",
             "drainSeconds=3600", "kv.hostTierBytes=1099511627776", "threads=16",
             "inferencePool.enabled=true", "inferencePool.picker.service=picker"),
}  # fmt: skip
"""Sets of values by name."""


def digest() -> str:
    """Return the digest of the chart and the values."""
    files = [CHART / name for name in ("Chart.yaml", "values.yaml", "values.schema.json")]
    content = [path.read_bytes() for path in (*files, *sorted((CHART / "templates").iterdir()))]
    return hashlib.sha256(b"\0".join(content) + repr(VALUES).encode()).hexdigest()


@cache
def objects(name: str) -> list[dict[str, Any]]:
    """Return the objects rendered with a set of values; raises AssertionError if the chart has changed since."""
    first, _, text = (RENDERED / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")
    assert first == f"# {digest()}", "python -m tests.deploy.helm.rendered, with helm"
    return [each for each in yaml.safe_load_all(text) if each]


def helm(*words: str, values: Iterable[str]) -> str:
    """Return what helm prints; raises AssertionError with that when helm fails."""
    given = [word for value in values for word in ("--set", value)]
    done = subprocess.run(["helm", *words, *given], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def render(values: Iterable[str]) -> list[dict[str, Any]]:
    """Return the objects that helm makes of values, in the order of kind and name."""
    found = [each for each in yaml.safe_load_all(helm("template", "chat", str(CHART), values=values)) if each]
    return sorted(found, key=lambda each: (each["kind"], each["metadata"]["name"]))


def main() -> None:
    RENDERED.mkdir(exist_ok=True)
    for name, values in VALUES.items():
        helm("lint", "--strict", str(CHART), values=values)
        text = yaml.safe_dump_all(render(values), sort_keys=True, width=120)
        (RENDERED / f"{name}.yaml").write_text(f"# {digest()}\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
