"""The compose files, parsed: what their programs are started with, and what the services may do."""

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from common.base.version import RELEASE
from common.settings.config import MEMORY_SECTIONS, ROUTER_SECTIONS, WORKER_SECTIONS, Config
from common.settings.options import parse
from common.wire.messages.worker_id import make_id
from deploy.containers import container
from deploy.containers.container import command_of
from deploy.containers.dependencies import requirements
from deploy.containers.memory_servers import specs
from deploy.operate.healthcheck import worker_here
from deploy.processes.mps import DEFAULT_PREFILL_PERCENT, PIPE_DIRECTORY
from deploy.processes.placement import Gpu

DEPLOY = Path(__file__).parents[3] / "deploy"
PROGRAMS = {
    "router": ROUTER_SECTIONS, "router.front": ROUTER_SECTIONS,
    "prefill_worker": WORKER_SECTIONS, "decode_worker": WORKER_SECTIONS,
}  # fmt: skip
SERVING = ("router", "prefill", "decode")
WORKERS = ("prefill", "decode", "decode-standby")
ENDPOINT = {"net": {"router_endpoint": "tcp://0.0.0.0:5570"}}
"""What the router alone is told."""
OVERLAYS = ("compose.yaml", "compose.gpu.yaml")
ALL = (*OVERLAYS, "compose.fronts.yaml")
REPLACED = ("command", "entrypoint", "test")
"""Keys whose lists Compose replaces; it appends others."""
VARIABLE = re.compile(r"\$\{(\w+):([-+])((?:[^{}]|\$\{[^}]*\})*)\}")


def document(name: str, **variables: str) -> dict[str, Any]:
    """A compose file, with every variable as it is given, or at its default."""

    def value(match: re.Match[str]) -> str:
        given, kind, otherwise = variables.get(match[1], ""), match[2], VARIABLE.sub(value, match[3])
        return (given or otherwise) if kind == "-" else otherwise if given else ""

    found: dict[str, Any] = yaml.safe_load(VARIABLE.sub(value, (DEPLOY / name).read_text(encoding="utf-8")))
    return found


def services(name: str, **variables: str) -> dict[str, Any]:
    """Of one file, or of another over compose.yaml: what that names is added, or takes the place of what was there."""
    base: dict[str, Any] = document("compose.yaml", **variables)["services"]
    if name == "compose.yaml":
        return base
    over: dict[str, Any] = document(name, **variables)["services"]
    return {each: _over(base.get(each, {}), over.get(each, {})) for each in base | over}


def _over(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        both = base.keys() & over.keys()
        return base | over | {key: _over(base[key], over[key]) for key in both if key not in REPLACED}
    return [*base, *over] if isinstance(base, list) and isinstance(over, list) else over


@pytest.fixture(autouse=True)
def a_mounted_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a container has at /model."""
    monkeypatch.setattr(container, "MOUNT", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def started_with(service: dict[str, Any]) -> Config:
    """What the program of a service reads from its command line."""
    words = shlex.split(service["command"])
    assert words[:4] == ["python", "-P", "-m", "deploy.containers.container"]
    flags = shlex.split(service.get("environment", {}).get("OVERLAY_FLAGS", ""))
    program, *argv = command_of(words[4], words[5], [*words[6:], *flags])
    return parse(Config, PROGRAMS[program], program, "", argv)


def made_secret(service: dict[str, Any]) -> str:
    """The path at which a service makes the secret, in a volume that the others may only read."""
    words = shlex.split(service["command"])
    assert words[:5] == ["python", "-P", "-m", "deploy.containers.container", "secret"]
    assert service["volumes"] == ["secret:/secret"]
    return words[5]


def probed_role(service: dict[str, Any]) -> str:
    """Of whom a worker's health check asks the router."""
    *command, url, role = service["healthcheck"]["test"]
    assert (command, url) == (["CMD", "python", "-P", "-m", "deploy.operate.healthcheck"], "http://router:8000")
    return str(role)


def memory_servers(service: dict[str, Any], gpus: list[Gpu]) -> list[Config]:
    """What the memory servers of a service read, on a machine with these GPUs."""
    words = shlex.split(service["command"])
    assert words[:4] == ["python", "-P", "-m", "deploy.containers.memory_servers"]
    started = specs(words[4], gpus, words[5:])
    return [parse(Config, MEMORY_SECTIONS, each.module, "", list(each.flags)) for each in started]


@pytest.mark.parametrize("overlay", ALL)
def test_every_program_knows_its_flags_and_finds_the_router(overlay: str) -> None:
    found = services(overlay)
    router = started_with(found["router"])
    for name in WORKERS:
        worker = started_with(found[name])
        role = name.removesuffix("-standby")
        assert worker.worker.id == worker_here(probed_role(found[name]))
        assert make_id(role, worker.worker.id)
        assert worker.model == router.model and worker.model.served_name == "demo_model"
        assert worker.net.secret_file == router.net.secret_file == made_secret(found["secret"])
        assert found[name]["depends_on"]["secret"] == {"condition": "service_completed_successfully"}
        assert worker.worker.device == "auto"


def test_clients_need_a_key_where_there_is_a_file_of_them() -> None:
    files = {given: document("compose.yaml", BATON_API_KEYS=given)["secrets"]["api_keys"] for given in ("", "/k")}
    assert files == {"": {"file": "/dev/null"}, "/k": {"file": "/k"}}
    assert "api_keys" in services("compose.yaml")["router"]["secrets"]
    assert started_with(services("compose.yaml")["router"]).router.api_key_file == ""
    assert started_with(services("compose.yaml", BATON_API_KEYS="/k")["router"]).router.api_key_file == (
        "/run/secrets/api_keys"
    )


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_workers_find_the_memory_server_of_their_device_and_agree_on_its_pool(overlay: str) -> None:
    found = services(overlay)
    memory = found["memory"]
    on_gpus = memory_servers(memory, [Gpu(0, 0), Gpu(1, 0)])
    assert [each.memory.device for each in on_gpus] == ["cuda:0", "cuda:1"]
    (server,) = memory_servers(memory, [])
    assert server.memory.device == "cpu"
    assert memory["healthcheck"]["test"][-1] == server.memory.socket
    assert "secret" in memory["depends_on"]
    assert server.net == started_with(found["prefill"]).net, "it finds the router as they do"
    shares = set()
    for name in WORKERS:
        worker = started_with(found[name])
        assert worker.worker.memory_socket == server.memory.socket, "a directory, in which each has its device's name"
        assert "memory" in found[name]["depends_on"], "or it may be stopped before who uses it"
        mounts = [each for each in memory["volumes"] if each not in found[name]["volumes"]]
        assert not mounts, "a socket is at the same path for all"
        shares.add((worker.kv, worker.prefill, worker.decode))
    assert len(shares) == 1, "whoever comes first says for all how large it is"


def test_the_pool_leaves_room_for_the_workers_that_may_come() -> None:
    """`--scale decode=2` fits by itself; for more, one says so."""
    kv = started_with(services("compose.gpu.yaml")["prefill"]).kv
    assert (kv.prefill_sharers, kv.decode_sharers) == (1, 2)
    more = services("compose.gpu.yaml", BATON_PREFILL_SHARERS="2", BATON_DECODE_SHARERS="4")
    for name in WORKERS:
        kv = started_with(more[name]).kv
        assert (kv.prefill_sharers, kv.decode_sharers) == (2, 4)


def test_gpus_are_shared_as_by_baton_serve() -> None:
    found = services("compose.gpu.yaml", BATON_GPUS="2,3")
    pipes = {found[name]["environment"][PIPE_DIRECTORY] for name in ("mps", "memory", *WORKERS)}
    assert len(pipes) == 1, "clients of one daemon"
    for name in ("memory", *WORKERS):
        service = found[name]
        assert f"mps:{next(iter(pipes))}" in service["volumes"]
        assert service["depends_on"]["mps"] == {"condition": "service_healthy"}, "who is before it does without it"
        assert service["environment"]["CUDA_VISIBLE_DEVICES"] == "2,3", "an index means one GPU to all"
        assert service["pid"] == found["mps"]["pid"] == "host"
        assert service["image"].startswith("baton-worker-gpu:")
    assert "CUDA_VISIBLE_DEVICES" not in found["mps"]["environment"], "it would number them anew"
    assert started_with(found["prefill"]).prefill.sm_share == DEFAULT_PREFILL_PERCENT


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_standby_is_a_decode_worker_that_is_started_if_asked_for(overlay: str) -> None:
    found = services(overlay, BATON_STANDBY_FOR="3")
    standby, decode = dict(found["decode-standby"]), found["decode"]
    assert started_with(standby).worker.standby == 3 and started_with(decode).worker.standby == 0
    assert standby.pop("profiles") == ["standby"]
    standby["environment"] = {k: v for k, v in standby["environment"].items() if k != "OVERLAY_FLAGS"}
    assert standby == {"environment": {}} | decode


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_the_containers_user_may_reach_sockets_and_pipes(overlay: str) -> None:
    volumes = document(overlay)["volumes"]
    dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    options = [dict(each.split("=") for each in v["driver_opts"]["o"].split(",")) for v in volumes.values() if v]
    assert options
    for each in options:
        assert each["mode"] == "0700"
        assert f"--uid {each['uid']} " in dockerfile


def test_a_hub_id_is_downloaded_by_one_service_and_only_read_by_the_others() -> None:
    found = services("compose.yaml", BATON_MODEL="owner/name")
    (cache,) = [each for each in found["model"]["volumes"] if isinstance(each, str)]
    volume, _, directory = cache.partition(":")
    assert f"HF_HUB_CACHE={directory}" in (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    for name in SERVING:
        service = found[name]
        assert service["depends_on"]["model"] == {"condition": "service_completed_successfully"}
        (mount,) = [each for each in service["volumes"] if isinstance(each, dict) and each["type"] == "volume"]
        assert (mount["source"], mount["target"], mount["read_only"]) == (volume, directory, True)
        assert shlex.split(service["command"])[5] == "owner/name"


def test_the_name_that_clients_use_may_be_chosen() -> None:
    found = services("compose.yaml", BATON_MODEL="/models/one", BATON_MODEL_NAME="my model")
    assert {started_with(found[name]).model.served_name for name in SERVING} == {"my model"}


def test_the_port_is_held_by_who_serves_nobody_and_routers_find_it() -> None:
    found = services("compose.yaml", BATON_PORT="9000")
    port, router = found["port"], found["router"]
    assert port["ports"] == ["9000:8000"] and "ports" not in router, "a router may be restarted, or be two"
    *command, address, path = shlex.split(port["command"])
    assert command == ["python", "-P", "-m", "deploy.containers.port_holder"] and address == "0.0.0.0:8000"
    assert started_with(router).router.take_over == path == port["healthcheck"]["test"][-1]
    assert port["volumes"] == ["port:/run/port"] and "port:/run/port" in router["volumes"]
    assert router["depends_on"]["port"]["required"] is False, "that of another project will do"
    own = document("compose.yaml")["volumes"]["port"]["name"]
    assert own == "${COMPOSE_PROJECT_NAME}_port"
    assert document("compose.yaml", BATON_PORT_VOLUME="baton_port")["volumes"]["port"]["name"] == "baton_port"


def test_fronts_share_the_port_that_is_held_and_the_router_leaves_it_to_them() -> None:
    base = services("compose.yaml", BATON_API_KEYS="/k")
    found = services("compose.fronts.yaml", BATON_API_KEYS="/k", BATON_FRONT_REPLICAS="3")
    router, front = started_with(found["router"]), started_with(found["front"])
    assert router.router.take_over == "" and router.net == started_with(base["router"]).net
    assert shlex.split(found["port"]["command"])[-1] == front.router.take_over
    assert "port:/run/port" in found["front"]["volumes"] and "ports" not in found["front"]
    scheme, _, where = front.router.front_endpoint.partition("://")
    name, _, port = where.partition(":")
    assert name in found and router.router.front_endpoint == f"{scheme}://0.0.0.0:{port}"
    assert front.router.host == "0.0.0.0", "Prometheus asks it"
    for field in ("model", "net"):
        assert dataclasses.replace(getattr(front, field), **ENDPOINT.get(field, {})) == getattr(router, field)
    assert front.router.api_key_file == router.router.api_key_file == "/run/secrets/api_keys"
    assert "api_keys" in found["front"]["secrets"]
    assert "router" in found["front"]["depends_on"], "or its streams end with the router"
    assert found["front"]["deploy"]["replicas"] == 3
    for name in ("router", *WORKERS):
        assert found[name]["command"] == base[name]["command"]
    mounts = [each for each in found["front"]["volumes"] if isinstance(each, dict)]
    assert mounts == [each for each in found["router"]["volumes"] if isinstance(each, dict)]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_how_many_workers_there_are_outlives_an_up(overlay: str) -> None:
    found = services(overlay, BATON_PREFILL_REPLICAS="2", BATON_DECODE_REPLICAS="3")
    assert [found[name]["deploy"]["replicas"] for name in WORKERS] == [2, 3, 1]
    assert [services(overlay)[name]["deploy"]["replicas"] for name in WORKERS] == [1, 1, 1]


def test_a_container_has_longer_to_stop_than_its_program_to_drain() -> None:
    base = services("compose.fronts.yaml")
    for name in (*SERVING, "front"):
        config = started_with(base[name])
        assert float(base[name]["stop_grace_period"].removesuffix("s")) > config.router.drain_s
        assert float(base[name]["stop_grace_period"].removesuffix("s")) > config.worker.drain_s


@pytest.mark.parametrize("overlay", ALL)
def test_every_service_is_hardened_and_bounded(overlay: str) -> None:
    for name, service in services(overlay).items():
        assert service["read_only"] and set(service["cap_drop"]) == {"ALL"}
        assert service["init"], "while a program starts it handles no signal, and a first process gets none of those"
        assert service["restart"] == ("no" if name in ("model", "secret") else "unless-stopped")
        assert service["logging"]["options"]["max-size"], "logs do not fill the disk"
        assert service["pids_limit"]
        assert "mem_limit" in service or name == "mps"
        assert "healthcheck" in service or name in ("model", "secret")


@pytest.mark.parametrize("overlay", ALL)
def test_each_image_is_built_once_from_the_target_that_it_is_named_after(overlay: str) -> None:
    """Two services' builds of one image differ by a label: the next `up` would find another, and start all anew."""
    stages = set(re.findall(r"(?m)^FROM \S+ AS (\S+)$", (DEPLOY / "Dockerfile").read_text(encoding="utf-8")))
    ours = [service for service in services(overlay).values() if service.get("profiles") != ["monitoring"]]
    built = [service for service in ours if "build" in service]
    assert sorted(service["image"] for service in built) == sorted({service["image"] for service in ours})
    assert {service["pull_policy"] for service in ours} == {"never"}, "what others build would be asked of a registry"
    for service in built:
        assert service["build"]["target"] in stages
        assert service["image"] == f"baton-{service['build']['target']}:{RELEASE}"
        assert "profiles" not in service, "it would not be built without"


def test_an_edit_of_a_source_file_installs_nothing_again() -> None:
    """What dependencies are installed by is copied before the sources are."""
    stages = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").split("\nFROM ")
    bodies = {stage.splitlines()[0].rpartition(" ")[2]: stage for stage in stages}
    assert "COPY pyproject.toml constraints.txt deploy/containers/dependencies.py ./" in bodies["dependencies"]
    for name in ("router", "cpu", "gpu"):
        assert bodies[f"{name}-dependencies"].startswith("dependencies AS ")
        assert "COPY" not in bodies[f"{name}-dependencies"]


def test_what_is_installed_is_what_pyproject_asks_for() -> None:
    pyproject = (DEPLOY.parent / "pyproject.toml").read_text(encoding="utf-8")
    router, cpu, gpu = (requirements(pyproject, extras) for extras in ([], ["worker"], ["worker", "cuda"]))
    assert any(line.startswith("aiohttp") for line in router)
    assert [line.split(">")[0] for line in cpu[len(router) :]] == ["safetensors", "setproctitle", "torch"]
    assert {line.split(">")[0] for line in gpu[len(cpu) :]} == {"cuda-bindings", "nvidia-ml-py", "triton"}
