"""The Helm chart: values, options and modules that it names are there; where helm is, it renders."""

import dataclasses
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from common.config import MEMORY_SECTIONS, ROUTER_SECTIONS, WORKER_SECTIONS, Config
from common.options import parse
from common.version import VERSION

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "baton"
TEMPLATES = {path.name: path.read_text(encoding="utf-8") for path in sorted((CHART / "templates").iterdir())}
ALL = "\n".join(TEMPLATES.values())
NEEDED = ("node=gpu-1", "model.claim=models", "secret.value=0123456789abcdef0123456789abcdef")
HUB = ("node=gpu-1", "model.id=owner/name", "model.cacheClaim=cache", "model.tokenSecret=hub", "secret.existing=mine")
OPTIONAL = ("autoscaling.enabled=true", "autoscaling.prometheus=http://prometheus:9090", "serviceMonitor.enabled=true",
            "serviceMonitor.labels.release=prometheus", "model.name=a name", "model.subPath=models--owner--name",
            "images.pullSecrets[0].name=registry", "router.service.type=LoadBalancer", "tolerations=null")  # fmt: skip
LARGE = ("kv.hostTierBytes=1099511627776", "kv.cpuPoolBytes=17179869184", "drainSeconds=3600", "threads=16")
RENDERED = {
    "gpus": NEEDED, "cpu": (*NEEDED, "gpu.enabled=false"), "hub": HUB, "everything": NEEDED + OPTIONAL,
    "large": (*NEEDED, *LARGE, r"gpu.devices=0\,1", "gpu.mps=false", "gpu.runtimeClass=", "disruptionBudgets=false"),
}  # fmt: skip
SECTIONS = {
    "router": ROUTER_SECTIONS, "memory": MEMORY_SECTIONS, "prefill": WORKER_SECTIONS, "decode": WORKER_SECTIONS
}  # fmt: skip
needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="needs helm")


def loaded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CHART / name).read_text(encoding="utf-8"))
    return found


def leaves(values: dict[str, Any], above: str = "") -> set[str]:
    """Dotted paths of all values; a mapping that is empty by default is one."""
    found: set[str] = set()
    for key, value in values.items():
        found |= leaves(value, f"{above}{key}.") if isinstance(value, dict) and value else {above + key}
    return found


def test_templates_use_the_values_that_there_are_and_all_of_them() -> None:
    used = set(re.findall(r"\.Values\.([\w.]+)", ALL))
    known = leaves(loaded("values.yaml"))
    unknown = {path for path in used if not any(leaf == path or leaf.startswith(f"{path}.") for leaf in known)}
    assert unknown == set()
    taken = set(re.findall(r"\$(?:of|prefill|decode)\.(\w+)", ALL))
    unused = {leaf for leaf in known if not any(leaf == path or leaf.startswith(f"{path}.") for path in used)}
    assert {leaf for leaf in unused if leaf.rpartition(".")[2] not in taken} == set()


def test_programs_know_the_options_and_are_there() -> None:
    sections = {field.name: field for field in dataclasses.fields(Config)}
    options = {
        f"--{name}-{option.name}".replace("_", "-") for name in sections
        for option in dataclasses.fields(getattr(Config(), name))
    }  # fmt: skip
    named = set(re.findall(r"(?m)^ *- (--[a-z-]+)=", ALL))
    assert len(named) > 10 and named <= options
    for module in set(re.findall(r"-m,? (deploy\.\w+)", ALL)):
        assert importlib.util.find_spec(module), module


def test_every_pod_is_bounded_and_every_container_hardened() -> None:
    pods = ALL.count("kind: Deployment")
    assert pods == 3
    assert ALL.count('include "baton.pod"') == pods
    (pod,) = re.findall(r'(?s)define "baton.pod" -}}(.*?){{- end -}}', ALL)
    assert "enableServiceLinks: false" in pod and "runAsNonRoot: true" in pod
    on_node = {name for name, text in TEMPLATES.items() if 'include "baton.onNode"' in text}
    assert on_node == {"memory.yaml", "workers.yaml"}, "the router needs nothing of the node"
    assert re.findall("host(?:PID|IPC|Network): true", ALL) == ["hostPID: true"]
    images = len(re.findall(r'include "baton\.(?:image|workerImage)"', ALL))
    # memory chooses one of two images; the init container of the directory has a security context of its own, and a
    # helper names an image
    assert ALL.count('include "baton.hardened"') == images - 3


def test_the_chart_has_baton_s_version() -> None:
    chart = loaded("Chart.yaml")
    assert chart["appVersion"] == chart["version"] == VERSION


@needs_helm
@pytest.mark.parametrize("values", RENDERED.values(), ids=RENDERED)
def test_helm_has_nothing_to_say_and_programs_read_what_it_renders(values: tuple[str, ...]) -> None:
    helm("lint", "--strict", str(CHART), values=values)
    rendered = [each for each in yaml.safe_load_all(helm("template", "chat", str(CHART), values=values)) if each]
    deployments = [each for each in rendered if each["kind"] == "Deployment"]
    assert sorted(each["metadata"]["name"] for each in deployments) == [
        "chat-decode", "chat-memory", "chat-prefill", "chat-router"
    ]  # fmt: skip
    services = {each["metadata"]["name"] for each in rendered if each["kind"] == "Service"}
    assert services == {"chat", "chat-internal"}
    read = {}
    for each in deployments:
        container = each["spec"]["template"]["spec"]["containers"][0]
        name = container["name"]
        read[name] = parse(Config, SECTIONS[name], name, "", container["args"])
        assert {"/run/secrets/baton", "/tmp"} < {mount["mountPath"] for mount in container["volumeMounts"]}
        assert read[name].net.secret_file == "/run/secrets/baton/secret"
        assert name == "router" or read[name].net.router_endpoint == "tcp://chat-internal:5570"
        if name in ("prefill", "decode"):
            probed = ["python", "-P", "-m", "deploy.healthcheck", "http://chat-internal:8000", name]
            assert container["startupProbe"]["exec"]["command"] == probed
            assert container["readinessProbe"]["exec"]["command"] == probed
    assert read["prefill"].kv == read["decode"].kv, "they say the same of the pool"
    assert read["prefill"].prefill == read["decode"].prefill


@needs_helm
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((), "model: either claim, or id and cacheClaim"),
        (("model.id=owner/name", "node=gpu-1"), "model: either claim, or id and cacheClaim"),
        (("model.claim=models",), "node: the kubernetes.io/hostname of the node"),
        (("model.claim=models", "node=gpu-1"), "secret: value or existing"),
        ((*NEEDED, "autoscaling.enabled=true"), "autoscaling.prometheus: its address"),
    ],
)
def test_what_is_needed_is_asked_for(values: tuple[str, ...], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        helm("template", "chat", str(CHART), values=values)


def helm(*words: str, values: Iterable[str]) -> str:
    """What it prints; raises AssertionError with that when it fails."""
    given = [word for value in values for word in ("--set", value)]
    done = subprocess.run(["helm", *words, *given], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
