"""The Helm chart: values, options and modules that it names are there; where helm is, it renders."""

import dataclasses
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from common.config import Config
from common.version import VERSION

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "baton"
TEMPLATES = {path.name: path.read_text(encoding="utf-8") for path in sorted((CHART / "templates").iterdir())}
ALL = "\n".join(TEMPLATES.values())
NEEDED = ("node=gpu-1", "model.claim=models", "secret.value=0123456789abcdef0123456789abcdef")
OPTIONAL = ("gpu.enabled=false", "autoscaling.enabled=true", "autoscaling.prometheus=http://prometheus:9090",
            "serviceMonitor.enabled=true", "model.name=a name")  # fmt: skip


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


@pytest.mark.skipif(shutil.which("helm") is None, reason="needs helm")
@pytest.mark.parametrize("values", [NEEDED, NEEDED + OPTIONAL], ids=["gpus", "everything"])
def test_helm_has_nothing_to_say_and_renders_it(values: tuple[str, ...]) -> None:
    given = [word for value in values for word in ("--set", value)]
    for command in (["helm", "lint", "--strict", str(CHART)], ["helm", "template", "chat", str(CHART)]):
        done = subprocess.run([*command, *given], capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
    kinds = [each["kind"] for each in yaml.safe_load_all(done.stdout) if each]
    assert kinds.count("Deployment") == 3 and kinds.count("Service") == 2
