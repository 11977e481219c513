"""compose.host.yaml: router and workers of several hosts find each other, and a drain ends before it is cut off."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from common.base.version import RELEASE
from common.settings.config import ROUTER_SECTIONS, Config
from common.settings.options import from_flags, parse
from deploy.cli import build_parser
from deploy.containers import container
from deploy.containers.container import command_of
from deploy.processes.keeper import KILL_DEADLINE_S, Deadlines
from deploy.processes.launch_plan import Kind
from deploy.serve.fleet_options import joining_fleet_of

FILE = Path(__file__).parents[3] / "deploy" / "compose.host.yaml"
VARIABLE = re.compile(r"\$\{(\w+):([-+?])((?:[^{}]|\$\{[^}]*\})*)\}")
GIVEN = {"BATON_SECRET": "/etc/baton/secret", "BATON_ROUTER": "10.0.0.1", "BATON_ADDRESS": "10.0.0.2"}


def services(**variables: str) -> dict[str, Any]:
    """Services with variables as given, or at their defaults; raises KeyError for one that is needed."""

    def value(match: re.Match[str]) -> str:
        name, kind, other = match[1], match[2], match[3]
        if kind == "?":
            return variables[name]
        given = variables.get(name, "")
        return (given or VARIABLE.sub(value, other)) if kind == "-" else VARIABLE.sub(value, other) if given else ""

    text = "\n".join(line for line in FILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    found: dict[str, Any] = yaml.safe_load(VARIABLE.sub(value, text))["services"]
    return found


@pytest.fixture(autouse=True)
def a_mounted_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "MOUNT", tmp_path)
    (tmp_path / "config.json").write_text("{}")


def words_of(service: dict[str, Any]) -> list[str]:
    words = shlex.split(service["command"])
    assert words[:4] == ["python", "-P", "-m", "deploy.containers.container"]
    return command_of(words[4], words[5], words[6:])


@pytest.mark.parametrize("name", [None, "a name"])
def test_workers_join_the_router_from_their_own_address(name: str | None) -> None:
    found = services(**GIVEN, BATON_DECODE="2", **({"BATON_MODEL_NAME": name} if name else {}))
    program, *flags = words_of(found["router"])
    router = parse(Config, ROUTER_SECTIONS, program, "", flags)
    module, *command = words_of(found["workers"])
    args = build_parser().parse_args(command)
    config = from_flags(Config, args)
    fleet = joining_fleet_of(args, config)
    assert (module, fleet.num_prefill, fleet.num_decode) == ("deploy", 0, 2)
    assert config.net.router_endpoint == router.net.router_endpoint == "tcp://10.0.0.1:5570"
    assert config.net.advertise == "10.0.0.2" and config.net.secret_file == router.net.secret_file
    assert config.model.served_name == router.model.served_name == (name or "demo_model")
    program, *flags = words_of(found["front"])
    front = parse(Config, ROUTER_SECTIONS, program, "", flags)
    assert program == "router.front" and front.router.front_endpoint == router.router.front_endpoint
    assert front.router.front_endpoint == "tcp://10.0.0.1:5580" and front.net.secret_file == router.net.secret_file
    assert front.router.port != router.router.port, "they may be on one host"
    assert found["front"]["healthcheck"]["test"][-1] == f"http://{front.router.host}:{front.router.port}"
    assert front.model.served_name == router.model.served_name
    for service in (found["router"], found["front"], found["workers"]):
        assert [mount["source"] for mount in service["volumes"] if isinstance(mount, dict)] == [
            "./demo_model", "/etc/baton/secret"
        ]  # fmt: skip


def test_containers_have_their_hosts_network_and_end_in_time() -> None:
    found = services(**GIVEN)
    _, *command = words_of(found["workers"])
    drains = Deadlines(0.0, 0.0, from_flags(Config, build_parser().parse_args(command)).worker.drain_s)
    needed_s = KILL_DEADLINE_S + sum(drains.of(kind, was_ready=True) for kind in (Kind.WORKER, Kind.MEMORY))
    for service in found.values():
        assert service["network_mode"] == "host" and "ports" not in service and "pid" not in service
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert int(service["stop_grace_period"].removesuffix("s")) >= needed_s + 10
        assert service["image"].endswith(f":{RELEASE}")
    assert [found[name].get("profiles") for name in ("router", "front", "workers")] == [["router"], ["front"], None]


@pytest.mark.parametrize("needed", GIVEN)
def test_what_a_host_has_to_be_told_is_asked_for(needed: str) -> None:
    with pytest.raises(KeyError, match=needed):
        services(**{name: value for name, value in GIVEN.items() if name != needed})
