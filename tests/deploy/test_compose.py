import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from common.config import (
    MEMORY_SECTIONS,
    ROUTER_SECTIONS,
    WORKER_SECTIONS,
    Config,
)
from common.options import parse

DEPLOY = Path(__file__).parents[2] / "deploy"
PROGRAMS = {
    "router": ROUTER_SECTIONS,
    "prefill_worker": WORKER_SECTIONS,
    "decode_worker": WORKER_SECTIONS,
    "common.memory": MEMORY_SECTIONS,
}
SERVING = ("router", "prefill", "decode")
WORKERS = ("prefill", "decode")


def document(name: str) -> dict[str, Any]:
    """A compose file, with every ${VARIABLE:-default} at its default."""
    text = (DEPLOY / name).read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))
    return found


def services(name: str) -> dict[str, Any]:
    found: dict[str, Any] = document(name)["services"]
    return found


def started_with(service: dict[str, Any], worker_flags: str | None) -> Config:
    """What the program of a service reads from its command line."""
    command = service["command"]
    line = command if isinstance(command, str) else command[-1]
    line = line.replace("$$WORKER_FLAGS", worker_flags or "").replace("$$HOSTNAME", "3a23965eb2f7")
    program, _, flags = line.partition(" -m ")[2].partition(" ")
    return parse(Config, PROGRAMS[program], program, "", shlex.split(flags))


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


@pytest.mark.parametrize("overlay", ["compose.yaml", "compose.gpu.yaml"])
def test_workers_find_the_memory_server_of_their_device_and_agree_on_its_pool(overlay: str) -> None:
    base, over = services("compose.yaml"), services(overlay)
    memory = base["memory"] | over["memory"]
    server = started_with(memory, None)
    assert memory["healthcheck"]["test"][-1] == server.memory.socket
    assert server.net == started_with(base["prefill"], None).net, "it finds the router as they do"
    assert memory["secrets"] == base["prefill"]["secrets"]
    shares = set()
    for role in WORKERS:
        worker = started_with(base[role], over[role]["environment"]["WORKER_FLAGS"])
        assert worker.worker.memory_socket == server.memory.socket
        assert worker.worker.device in ("auto", server.memory.device)
        assert "memory" in base[role]["depends_on"], "or it may be stopped before who uses it"
        assert set(memory["volumes"]) < set(base[role]["volumes"])
        shares.add((worker.kv, worker.prefill, worker.decode))
    assert len(shares) == 1, "whoever comes first says for all how large it is"


def test_on_two_gpus_decode_workers_have_a_memory_server_of_their_own() -> None:
    base, gpu = services("compose.yaml"), services("compose.gpu.yaml")
    theirs = started_with(gpu["memory-decode"], None)
    flags = gpu["decode"]["environment"]["WORKER_FLAGS"].replace("/run/memory/socket", "/run/memory/memory-decode")
    assert started_with(base["decode"], flags).worker.memory_socket == theirs.memory.socket
    assert gpu["memory-decode"]["healthcheck"]["test"][-1] == theirs.memory.socket
    assert theirs.memory.device == "cuda:1" and gpu["memory-decode"]["profiles"] == ["two-gpus"]


@pytest.mark.parametrize("overlay", ["compose.yaml", "compose.gpu.yaml"])
def test_a_standby_is_a_decode_worker_that_is_started_if_asked_for_and_shares_their_weights(overlay: str) -> None:
    base, over = services("compose.yaml"), services(overlay)
    standby, decode = base["decode-standby"], base["decode"]
    own = {"profiles": ["standby"], "environment": standby["environment"]}
    assert standby == decode | own
    read, beside = (
        started_with(base[name], over[name]["environment"]["WORKER_FLAGS"]) for name in ("decode-standby", "decode")
    )
    assert read.worker.standby == 1 and read.kv == beside.kv
    assert read.worker.memory_socket == beside.worker.memory_socket and read.worker.device == beside.worker.device


def test_only_the_containers_user_may_reach_the_memory_server() -> None:
    compose, dockerfile = document("compose.yaml"), (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    volume, _, directory = compose["services"]["memory"]["volumes"][0].partition(":")
    assert directory == str(Path(started_with(compose["services"]["memory"], None).memory.socket).parent)
    options = dict(each.split("=") for each in compose["volumes"][volume]["driver_opts"]["o"].split(","))
    assert options["mode"] == "0700"
    assert f"--uid {options['uid']} " in dockerfile


def test_a_container_has_longer_to_stop_than_its_program_to_drain() -> None:
    base = services("compose.yaml")
    for name in SERVING:
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
