import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from common.base.errors import ConfigError
from common.settings.config import MEMORY_SECTIONS, Config, DecodeSection, PrefillSection
from common.settings.memory_sections import MemorySection
from common.settings.options import add_flags, from_flags
from common.wire.messages.worker import Role
from deploy.cli import ALL_SECTIONS
from deploy.processes.launch_plan import Kind, ProcessSpec, all_processes, host_processes, plan_workers
from deploy.processes.placement import Gpu, Placement, in_either_role, place_standbys, place_workers, spread_workers


def read_back(spec: ProcessSpec) -> Config:
    parser = argparse.ArgumentParser()
    add_flags(parser, Config, MEMORY_SECTIONS if spec.kind is Kind.MEMORY else ALL_SECTIONS)
    return from_flags(Config, parser.parse_args(spec.flags))


def plan_processes(
    config: Config, placements: list[Placement], runtime_dir: Path, num_cores: int, weights_bytes: int
) -> list[ProcessSpec]:
    return all_processes(plan_workers(config, placements, runtime_dir, num_cores, weights_bytes), placements)


def test_every_process_can_read_its_flags_back() -> None:
    config = Config()
    config = replace(config, model=replace(config.model, path="/models/a b", name="a"))
    config = replace(config, kv=replace(config.kv, block_size=32, memory_fraction=0.9))
    config = replace(config, prefill=PrefillSection(max_num_seqs=7), decode=DecodeSection(max_num_seqs=9))
    gpu = Gpu(0, 80 * 10**9)
    specs = plan_processes(config, place_workers(1, 2, [gpu]), Path("/tmp/baton-x"), 8, 0)
    router, _, prefill, *decodes = (read_back(spec) for spec in specs)
    assert [spec.name for spec in specs] == ["router", "memory-0", "prefill-0", "decode-0", "decode-1"]
    assert {each.net.router_endpoint for each in (router, prefill, *decodes)} == {"ipc:///tmp/baton-x/router.sock"}
    assert [each.net.handoff_endpoint for each in decodes] == [
        "ipc:///tmp/baton-x/decode-0.sock",
        "ipc:///tmp/baton-x/decode-1.sock",
    ]
    assert {each.model.path for each in (router, prefill, *decodes)} == {"/models/a b"}
    assert [each.worker.device for each in (prefill, *decodes)] == ["cuda:0"] * 3
    assert [each.kv.memory_fraction for each in (prefill, *decodes)] == [0.8925] * 3, (
        "all but what the memory server takes"
    )
    assert {(each.kv.prefill_sharers, each.kv.decode_sharers) for each in (prefill, *decodes)} == {(1, 2)}
    assert len({(each.model, each.prefill, each.decode, each.kv) for each in (prefill, *decodes)}) == 1, (
        "whoever comes first makes the pool of all"
    )
    assert decodes[1].worker.id == "decode-1"
    assert decodes[1].kv.block_size == 32


def test_cpu_workers_share_the_cores() -> None:
    specs = plan_processes(Config(), place_workers(1, 1, []), Path("/tmp/baton-x"), 8, 0)
    assert [read_back(spec).worker.num_threads for spec in specs[2:]] == [4, 4]
    assert [read_back(spec).worker.device for spec in specs[2:]] == ["cpu", "cpu"]


def test_a_standby_is_for_the_workers_of_its_role_on_its_device_and_takes_no_cores() -> None:
    workers = place_workers(1, 2, [])
    placements = workers + place_standbys(workers, [Role.PREFILL, Role.DECODE])
    specs = plan_processes(Config(), placements, Path("/tmp/baton-x"), 9, 0)
    sections = [read_back(spec).worker for spec in specs if spec.kind is Kind.WORKER]
    assert [(each.id, each.standby, each.num_threads) for each in sections] == [
        ("prefill-0", 0, 3),
        ("decode-0", 0, 3),
        ("decode-1", 0, 3),
        ("prefill-standby-0", 1, 3),
        ("decode-standby-0", 2, 3),
    ]
    assert len({each.memory_socket for each in sections}) == 1


def test_endpoints_that_the_user_set_are_kept() -> None:
    config = Config()
    net = replace(
        config.net, router_endpoint="tcp://0.0.0.0:5570", handoff_endpoint="tcp://0.0.0.0:*", secret_file="/secret"
    )
    specs = plan_processes(replace(config, net=net), place_workers(1, 1, []), Path("/tmp/baton-x"), 8, 0)
    assert [read_back(spec).net.router_endpoint for spec in specs] == ["tcp://0.0.0.0:5570"] * 4
    assert read_back(specs[3]).net.handoff_endpoint == "tcp://0.0.0.0:*"
    net = replace(config.net, advertise="10.0.0.1", handoff_endpoint="auto")
    specs = plan_processes(replace(config, net=net), place_workers(1, 1, []), Path("/tmp/baton-x"), 4, 0)
    assert [read_back(spec).net.handoff_endpoint for spec in specs[1:]] == ["auto"] * 3, "in TCP, for other hosts"


def test_a_socket_path_too_long_for_the_kernel_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 100"):
        plan_processes(Config(), place_workers(0, 1, []), Path("/" + "d" * 90), 8, 0)


def test_each_device_has_a_memory_server_whose_socket_its_workers_know() -> None:
    placements = place_workers(2, 2, [Gpu(0, 80 * 10**9), Gpu(3, 80 * 10**9)])
    config = Config(memory=MemorySection(host_tier_fraction=0.5))
    specs = plan_processes(config, placements, Path("/tmp/baton-x"), 8, 8 * 10**9)
    servers = {spec.name: read_back(spec) for spec in specs if spec.kind is Kind.MEMORY}
    assert {name: (each.memory.id, each.memory.device, each.memory.socket) for name, each in servers.items()} == {
        "memory-0": ("memory-0", "cuda:0", "/tmp/baton-x/memory-0.sock"),
        "memory-3": ("memory-3", "cuda:3", "/tmp/baton-x/memory-3.sock"),
    }
    assert [each.memory.host_tier_fraction for each in servers.values()] == [0.25, 0.25], "of the memory of one host"
    assert {each.net.router_endpoint for each in servers.values()} == {read_back(specs[0]).net.router_endpoint}
    workers = [read_back(spec).worker for spec in specs if spec.kind is Kind.WORKER]
    assert [(each.device, each.memory_socket) for each in workers] == 2 * [
        ("cuda:0", "/tmp/baton-x/memory-0.sock"),
        ("cuda:3", "/tmp/baton-x/memory-3.sock"),
    ]


def test_where_roles_change_pools_leave_room_for_each_worker_in_either_role() -> None:
    gpus = [Gpu(0, 80 * 10**9), Gpu(1, 80 * 10**9)]
    placements = place_workers(1, 2, gpus)
    plan = plan_workers(Config(), placements, Path("/tmp/baton-x"), 8, 0, in_either_role(placements))
    successor = Placement("prefill-1", Role.PREFILL, gpus[1])
    read = {spec.name: read_back(spec) for spec in map(plan.spec, [*placements, successor])}
    sharers = {name: (config.kv.prefill_sharers, config.kv.decode_sharers) for name, config in read.items()}
    assert sharers == {"prefill-0": (2, 2), "decode-0": (1, 1), "decode-1": (2, 2), "prefill-1": (1, 1)}
    assert read["prefill-1"].worker.device == "cuda:1"
    assert read["prefill-1"].worker.memory_socket == read["decode-0"].worker.memory_socket
    assert all_processes(plan, placements)[0].name == "router"


def test_hosts_of_a_router_give_their_memory_servers_names_of_their_own() -> None:
    net = replace(Config().net, router_endpoint="tcp://10.0.0.1:5570", advertise="10.0.0.2")
    placements = spread_workers(2, 0, [Gpu(0, 0), Gpu(1, 0)])
    plan = plan_workers(replace(Config(), net=net), placements, Path("/tmp/baton-x"), 8, 0, host="b")
    servers, workers = (host_processes(plan, placements)[:2], host_processes(plan, placements)[2:])
    assert [spec.name for spec in servers] == ["memory-0-b", "memory-1-b"]
    assert [read_back(spec).memory.id for spec in servers] == ["memory-0-b", "memory-1-b"]
    assert [read_back(spec).memory.socket for spec in servers] == [
        read_back(spec).worker.memory_socket for spec in workers
    ]
    assert {read_back(spec).net.router_endpoint for spec in (*servers, *workers)} == {"tcp://10.0.0.1:5570"}
