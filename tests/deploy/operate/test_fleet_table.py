from typing import Any

import pytest

from common.settings.config import NetSection
from common.wire.messages.memory_reports import MemoryHeartbeat, MemoryReady
from common.wire.messages.operator import RoleChange, Stage
from common.wire.messages.worker import Role
from deploy.operate.fleet_table import fleet_table
from router.dispatch.incidents import Incidents
from router.observe.health import report
from router.placement.worker_pool import WorkerPool
from router.workers.memory_servers import MemoryServer
from router.workers.role_changes import RoleChanges
from tests.support.messages import heartbeat, kv_path, worker_ready

NOW_S = 100_000.0


def health(*, prefill: str = "prefill-0", version: str = "0.1.0", error: str = "") -> Any:
    pool = WorkerPool(NetSection(), 4)
    gpu = "cuda:0 NVIDIA H200 feb60d5f"
    pool.add(worker_ready(prefill, Role.PREFILL, device=gpu, version=version), NOW_S - 5)
    pool.add(worker_ready("decode-1", Role.DECODE, device=gpu, standby=1, version="0.1.0"), NOW_S - 7_260)
    pool.add(worker_ready("decode-0", Role.DECODE, device=gpu, version="0.1.0"), NOW_S - 61)
    pool.beat(heartbeat("decode-0", num_free_blocks=(4,)), NOW_S)
    pool.set_path(kv_path(prefill, "decode-0", error=error))
    pool.set_path(kv_path(prefill, "decode-1", error="no way"))
    server = MemoryServer(MemoryReady("memory-0", 1, 9, "0.1.0", gpu), last_seen_s=NOW_S, joined_s=NOW_S - 90_000)
    server.beat = MemoryHeartbeat("memory-0", 1, 8_040_000_000, 29_000_000_000, 1000, 400, 300, 0, 0, 0, 0, 0, 0, 0, ())
    changes = RoleChanges(Incidents(), lambda: NOW_S - 12.0)
    why = "prefill-1 on cuda:0 becomes decode-2: 492 of 512 rows"
    changes.on_change(b"", RoleChange("operator", 1, "prefill-1", "decode-2", Role.DECODE, Stage.BEGUN, why))
    changes.on_change(b"", RoleChange("operator", 1, "prefill-1", "decode-2", Role.DECODE, Stage.DONE, "after 5.0 s"))
    return report(pool, [server], changes, draining=False, now_s=NOW_S) | {"version": "0.1.0"}


def test_each_has_a_line_and_what_is_wrong_stands_below() -> None:
    assert fleet_table(health()).splitlines() == [
        "PREFILL    DEVICE  STATE    TO COMPUTE  KV BLOCKS  SINCE",
        "prefill-0  cuda:0  serving  0 tokens    -          5 s",
        "",
        "DECODE    DEVICE  STATE       SEQUENCES  KV BLOCKS  SINCE",
        "decode-0  cuda:0  serving     0 of 8     5          1 min 1 s",
        "decode-1  cuda:0  in reserve  0 of 8     -          2 h 1 min",
        "",
        "MEMORY    DEVICE  WEIGHTS  LEFT      KV BLOCKS     CACHED  SINCE",
        "memory-0  cuda:0  8.04 GB  29.00 GB  600 of 1,000  300     1 d 1 h",
        "",
        "NVIDIA H200: cuda:0",
        "version 0.1.0",
        "degraded: the KV path from prefill-0 to decode-1 (shm) failed: no way",
        "12 s ago, done: prefill-1 on cuda:0 becomes decode-2: 492 of 512 rows",
    ]


def test_it_fits_a_terminal() -> None:
    body = health(prefill="prefill-0123456789ab", error="so many words " * 20)
    (worker,) = body["workers"]["prefill"]
    worker |= {"outstanding_prompt_tokens": 524_288, "used_blocks": 41_234, "since_s": 46_799.0}
    body["memory_servers"][0] |= {"free_bytes": 114e9, "blocks": 61_234, "free_blocks": 0, "cached_blocks": 51_234}
    assert max(map(len, fleet_table(body).splitlines())) <= 80


def test_what_is_wrong_is_said_once_behind_the_state() -> None:
    shown = fleet_table(health(error="no way")).split("version 0.1.0\n")[1]
    told = [line for line in shown.splitlines() if line.startswith("degraded: ")]
    assert told[-2:] == [
        "degraded: the KV path from prefill-0 to decode-0 (shm) failed: no way",
        "degraded: the KV path from prefill-0 to decode-1 (shm) failed: no way",
    ]


def test_versions_that_differ_have_names() -> None:
    lines = fleet_table(health(version="0.2.0")).splitlines()
    assert {"version 0.2.0: prefill-0", "version 0.1.0: the router, decode-0, decode-1, memory-0"} < {*lines}


def test_of_whom_there_is_none_it_is_said() -> None:
    body = health() | {"workers": {"prefill": [], "decode": []}, "memory_servers": [], "problems": ["nobody is here"]}
    shown = fleet_table(body).splitlines()
    assert [line.split()[0] for line in shown if line][:6] == ["PREFILL", "none", "DECODE", "none", "MEMORY", "none"]
    assert any(line.endswith(": nobody is here") for line in shown)


def test_a_router_that_drains_says_so() -> None:
    assert "the router is draining: " in fleet_table(health() | {"status": "draining"})


def test_another_body_is_told() -> None:
    with pytest.raises(KeyError):
        fleet_table({"status": "ok"})


def test_what_a_terminal_would_obey_is_shown() -> None:
    body = health() | {"problems": ["\x1b[2J\ud800"]}
    assert "degraded: \\x1b[2J\\ud800" in fleet_table(body)
