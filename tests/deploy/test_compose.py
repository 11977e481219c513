import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from common.config import DECODE_SECTIONS, PREFILL_SECTIONS, ROUTER_SECTIONS, Config
from common.options import parse

DEPLOY = Path(__file__).parents[2] / "deploy"
PROGRAMS = {"router": ROUTER_SECTIONS, "prefill": PREFILL_SECTIONS, "decode": DECODE_SECTIONS}
WORKERS = ("prefill", "decode")


def services(name: str) -> dict[str, Any]:
    """The services of a compose file, with every ${VARIABLE:-default} at its default."""
    text = (DEPLOY / name).read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))["services"]
    return found


def started_with(service: dict[str, Any], worker_flags: str | None) -> Config:
    """What the program of a service reads from its command line."""
    command = service["command"]
    line = command if isinstance(command, str) else command[-1]
    line = line.replace("$$WORKER_FLAGS", worker_flags or "").replace("$$HOSTNAME", "3a23965eb2f7")
    program, _, flags = line.partition(" -m ")[2].partition(" ")
    return parse(Config, PROGRAMS[program.removesuffix("_worker")], program, "", shlex.split(flags))


@pytest.mark.parametrize("overlay", ["compose.yaml", "compose.gpu.yaml"])
def test_every_program_knows_its_flags(overlay: str) -> None:
    base, over = services("compose.yaml"), services(overlay)
    router = started_with(base["router"], None)
    for role in WORKERS:
        worker = started_with(base[role], over[role]["environment"]["WORKER_FLAGS"])
        assert worker.worker.id == f"{role}-3a23965eb2f7"
        assert worker.model == router.model
        assert worker.net.secret_file == router.net.secret_file == f"/run/secrets/{base[role]['secrets'][0]}"
        assert worker.worker.device == ("cuda:0" if overlay == "compose.gpu.yaml" else "auto")


def test_both_workers_fit_on_one_gpu() -> None:
    base, over = services("compose.yaml"), services("compose.gpu.yaml")
    configs = [started_with(base[role], over[role]["environment"]["WORKER_FLAGS"]) for role in WORKERS]
    assert sum(config.kv.memory_fraction for config in configs) < 0.9


def test_a_container_has_longer_to_stop_than_its_program_to_drain() -> None:
    base = services("compose.yaml")
    for name in PROGRAMS:
        config = started_with(base[name], None)
        assert float(base[name]["stop_grace_period"].removesuffix("s")) > config.router.drain_s
        assert float(base[name]["stop_grace_period"].removesuffix("s")) > config.worker.drain_s


def test_a_program_is_not_the_first_process_of_its_container() -> None:
    """While it starts it handles no signal, and a first process gets none that it does not handle."""
    assert all(service["init"] is True for service in services("compose.yaml").values())


def test_every_service_is_hardened() -> None:
    for service in services("compose.yaml").values():
        assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["restart"] == "unless-stopped"


def test_images_are_built_from_targets_of_the_dockerfile() -> None:
    stages = set(re.findall(r"(?m)^FROM \S+ AS (\S+)$", (DEPLOY / "Dockerfile").read_text(encoding="utf-8")))
    assert {service["build"]["target"] for service in services("compose.yaml").values()} <= stages
