"""The Helm chart: values, options and modules that it names are there; where helm is, it renders."""

import dataclasses
import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml  # type: ignore[import-untyped]

from common.base.version import RELEASE
from common.settings.config import MEMORY_SECTIONS, ROUTER_SECTIONS, WORKER_SECTIONS, Config
from common.settings.options import parse

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
OPTIONS = {
    "kv.memoryFraction": "kv.memory_fraction", "kv.cpuPoolBytes": "kv.cpu_pool_bytes",
    "kv.hostTierBytes": "memory.host_tier_bytes", "kv.prefillSharers": "kv.prefill_sharers",
    "kv.decodeSharers": "kv.decode_sharers", "prefill.smShare": "prefill.sm_share", "threads": "worker.num_threads",
    "drainSeconds": "worker.drain_s",
}  # fmt: skip
"""Values that are an option's."""
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
SOUND = {
    "nothing": {}, "what is needed": {"node": "gpu-1", "model": {"claim": "models"}, "secret": {"value": 64 * "0"}},
    "a parent chart": {"global": {"registry": "x"}}, "a GPU": {"gpu": {"devices": 1}},
    "two GPUs": {"gpu": {"devices": "0,1"}},
    "a limit": {"decode": {"resources": {"limits": {"cpu": 2, "memory": "8Gi"}}}},
    "flags": {"router": {"flags": ["--router-max-requests=100"]}},
}  # fmt: skip
MISTAKES: dict[str, tuple[dict[str, Any], str, str]] = {
    "misspelt": ({"decode": {"replica": 2}}, "/decode", "'replica' was unexpected"),
    "misspelt at the top": ({"prefil": {"replicas": 2}}, "", "'prefil' was unexpected"),
    "of another kind": ({"decode": {"smShare": 80}}, "/decode", "'smShare' was unexpected"),
    "misspelt resource": ({"router": {"resources": {"limit": {}}}}, "/router/resources", "'limit' was unexpected"),
    "text for a number": ({"prefill": {"replicas": "2"}}, "/prefill/replicas", '"2" is not of type "integer"'),
    "a part of a worker": ({"decode": {"replicas": 1.5}}, "/decode/replicas", '1.5 is not of type "integer"'),
    "no workers": ({"decode": {"replicas": 0}}, "/decode/replicas", "0 is less than the minimum of 1"),
    "scaled to none": (
        {"autoscaling": {"prefill": {"minReplicas": 0}}}, "/autoscaling/prefill/minReplicas", "less than the minimum"
    ),
    "percent for a share": ({"kv": {"memoryFraction": 85}}, "/kv/memoryFraction", "85 is greater than the maximum"),
    "a share for percent": ({"prefill": {"smShare": 0}}, "/prefill/smShare", "less than the minimum of 1"),
    "text for yes": ({"gpu": {"enabled": "yes"}}, "/gpu/enabled", '"yes" is not of type "boolean"'),
    "no number of a GPU": ({"gpu": {"devices": "all"}}, "/gpu/devices", '"all" does not match'),
    "a number for a tag": ({"images": {"tag": 1.2}}, "/images/tag", '1.2 is not of type "string"'),
    "one flag": ({"router": {"flags": "--log-level=debug"}}, "/router/flags", 'is not of type "array"'),
    "no flag": ({"router": {"flags": ["log-level=debug"]}}, "/router/flags/0", "does not match"),
    "a directory of nowhere": ({"memory": {"directory": "run/baton"}}, "/memory/directory", "does not match"),
    "a short secret": ({"secret": {"value": "hunter2"}}, "/secret/value", "is not valid under any of"),
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


def test_the_schema_has_the_values_that_there_are_with_the_limits_of_their_options() -> None:
    known = {re.sub(r"\.resources\..*", ".resources", leaf) for leaf in leaves(loaded("values.yaml"))}
    assert schema_leaves(SCHEMA) == known | {"global"}
    for value, option in OPTIONS.items():
        section, _, name = option.partition(".")
        field = next(each for each in dataclasses.fields(getattr(Config(), section)) if each.name == name)
        said = schema_of(value)
        assert (said["minimum"], said["maximum"]) == field.metadata["within"], value


@pytest.mark.parametrize("values", SOUND.values(), ids=SOUND)
def test_sound_values_pass(values: dict[str, Any]) -> None:
    assert refusals(values) == []


@pytest.mark.parametrize(("values", "path", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_refused_by_its_key(values: dict[str, Any], path: str, said: str) -> None:
    ((found, message),) = refusals(values)
    assert found == path and said in message, message


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
    assert chart["appVersion"] == chart["version"] == RELEASE


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
            probed = ["python", "-P", "-m", "deploy.operate.healthcheck", "http://chat-internal:8000", name]
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


@needs_helm
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("decode.replica=2", "at '/decode': additional properties 'replica' not allowed"),
        ("prefill.replicas=two", "at '/prefill/replicas': got string, want integer"),
        ("decode.replicas=0", "at '/decode/replicas': minimum: got 0, want 1"),
        ("secret.value=hunter2", "at '/secret/value': minLength: got 7, want 32"),
    ],
)
def test_helm_refuses_mistakes(value: str, said: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(said)):
        helm("template", "chat", str(CHART), values=(*NEEDED, value))


def schema_of(path: str) -> dict[str, Any]:
    """Of a value by its dotted path."""
    found = SCHEMA
    for key in path.split("."):
        found = found["properties"][key]
    return found


def schema_leaves(schema: dict[str, Any], above: str = "") -> set[str]:
    """Dotted paths of all values, as far as they are the chart's own."""
    found: set[str] = set()
    for key, each in schema["properties"].items():
        found |= schema_leaves(each, f"{above}{key}.") if "properties" in each else {above + key}
    return found


def refusals(values: dict[str, Any]) -> list[tuple[str, str]]:
    """What is wrong with the default values under these, by where."""
    found = jsonschema_rs.Draft7Validator(SCHEMA).iter_errors(merged(loaded("values.yaml"), values))
    return [("".join(f"/{key}" for key in error.instance_path), error.message) for error in found]


def merged(values: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """As helm does it: mappings by their keys, all else replaced."""
    both = {key: merged(values[key], other) for key, other in others.items()
            if isinstance(other, dict) and isinstance(values.get(key), dict)}  # fmt: skip
    return values | others | both


def helm(*words: str, values: Iterable[str]) -> str:
    """What it prints; raises AssertionError with that when it fails."""
    given = [word for value in values for word in ("--set", value)]
    done = subprocess.run(["helm", *words, *given], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
