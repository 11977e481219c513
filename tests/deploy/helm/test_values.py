"""The Helm chart: values, options and modules that it names are there, and its schema refuses mistakes."""

import argparse
import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml  # type: ignore[import-untyped]

from common.base.version import RELEASE
from common.settings.config import Config
from deploy.serve.fleet_options import add_joining

CHART = Path(__file__).parents[3] / "deploy" / "helm" / "baton"
TEMPLATES = {path.name: path.read_text(encoding="utf-8") for path in sorted((CHART / "templates").iterdir())}
ALL = "\n".join(TEMPLATES.values())
OPTIONS = {
    "kv.memoryFraction": "kv.memory_fraction", "kv.cpuPoolBytes": "kv.cpu_pool_bytes",
    "kv.hostTierBytes": "memory.host_tier_bytes", "threads": "worker.num_threads", "drainSeconds": "worker.drain_s",
}  # fmt: skip
"""Values that are an option's."""
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
SOUND = {
    "nothing": {}, "what is needed": {"model": {"claim": "models"}, "secret": {"value": 64 * "0"}},
    "a parent chart": {"global": {"registry": "x"}}, "a share of Pods": {"rollout": {"maxUnavailable": "25%"}},
    "a key of a node": {"router": {"nodeSelector": {"kubernetes.io/hostname": "a"}}},
    "a limit": {"decode": {"resources": {"limits": {"cpu": 2, "memory": "8Gi"}}}},
    "flags": {"router": {"flags": ["--router-max-requests=100"]}},
}  # fmt: skip
MISTAKES: dict[str, tuple[dict[str, Any], str, str]] = {
    "misspelt": ({"decode": {"replica": 2}}, "/decode", "'replica' was unexpected"),
    "misspelt at the top": ({"prefil": {"replicas": 2}}, "", "'prefil' was unexpected"),
    "of another kind": ({"decode": {"prefill": 1}}, "/decode", "'prefill' was unexpected"),
    "placed nowhere": ({"placement": "nodes"}, "/placement", '"nodes" is not one of'),
    "misspelt resource": ({"router": {"resources": {"limit": {}}}}, "/router/resources", "'limit' was unexpected"),
    "text for a number": ({"prefill": {"replicas": "2"}}, "/prefill/replicas", '"2" is not of type "integer"'),
    "a part of a worker": ({"decode": {"replicas": 1.5}}, "/decode/replicas", '1.5 is not of type "integer"'),
    "no workers": ({"decode": {"replicas": 0}}, "/decode/replicas", "0 is less than the minimum of 1"),
    "scaled to none": (
        {"autoscaling": {"prefill": {"minReplicas": 0}}}, "/autoscaling/prefill/minReplicas", "less than the minimum"
    ),
    "percent for a share": ({"kv": {"memoryFraction": 85}}, "/kv/memoryFraction", "85 is greater than the maximum"),
    "a share for percent": ({"gpu": {"smShare": 0}}, "/gpu/smShare", "less than the minimum of 1"),
    "text for yes": ({"gpu": {"enabled": "yes"}}, "/gpu/enabled", '"yes" is not of type "boolean"'),
    "no number of GPUs": ({"gpu": {"count": "all"}}, "/gpu/count", '"all" is not of type "integer"'),
    "a number for a tag": ({"images": {"tag": 1.2}}, "/images/tag", '1.2 is not of type "string"'),
    "one flag": ({"router": {"flags": "--log-level=debug"}}, "/router/flags", 'is not of type "array"'),
    "no flag": ({"router": {"flags": ["log-level=debug"]}}, "/router/flags/0", "does not match"),
    "a short secret": ({"secret": {"value": "hunter2"}}, "/secret/value", "is not valid under any of"),
}  # fmt: skip


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
    known = {re.sub(r"\.resources\..*", ".resources", leaf) for leaf in leaves(loaded("values.yaml"))}
    unknown = {path for path in used if not any(leaf == path or leaf.startswith(f"{path}.") for leaf in known)}
    assert unknown == set()
    taken = set(re.findall(r"\$(?:of|all)\.(\w+)", ALL))
    unused = {leaf for leaf in known if not any(leaf == path or leaf.startswith(f"{path}.") for path in used)}
    assert {leaf for leaf in unused if leaf.rpartition(".")[2] not in taken} == set()


def test_programs_know_the_options_and_are_there() -> None:
    sections = {field.name: field for field in dataclasses.fields(Config)}
    options = {
        f"--{name}-{option.name}".replace("_", "-") for name in sections
        for option in dataclasses.fields(getattr(Config(), name))
    }  # fmt: skip
    named = set(re.findall(r"(?m)^ *- (--[a-z-]+)=", ALL))
    joining = argparse.ArgumentParser()
    add_joining(joining)
    assert len(named) > 10 and named <= options | set(joining._option_string_actions)
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


def test_the_chart_has_baton_s_version() -> None:
    chart = loaded("Chart.yaml")
    assert chart["appVersion"] == chart["version"] == RELEASE


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
