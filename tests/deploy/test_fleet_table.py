from typing import Any

import pytest

from common.config import NetSection
from common.wire.memory_reports import MemoryHeartbeat, MemoryReady
from common.wire.messages import Role
from common.wire.operator_messages import RoleChange, Stage
from deploy.fleet_table import fleet_table
from router.health import report
from router.incidents import Incidents
from router.memory_servers import MemoryServer
from router.role_changes import RoleChanges
from router.worker_pool import WorkerPool
from tests.messages import heartbeat, kv_path, worker_ready

NOW_S = 100_000.0


def health(**memory: Any) -> Any:
    pool = WorkerPool(NetSection(), 4)
    gpu = "cuda:0 NVIDIA H200 feb60d5f"
    pool.add(worker_ready("prefill-0", Role.PREFILL, device=gpu), NOW_S - 5)
    pool.add(worker_ready("decode-1", Role.DECODE, device=gpu, standby=1), NOW_S - 7_260)
    pool.add(worker_ready("decode-0", Role.DECODE, device=gpu), NOW_S - 61)
    pool.beat(heartbeat("decode-0", num_free_blocks=(4,)), NOW_S)
    pool.set_path(kv_path("prefill-0", "decode-0", error="no way"))
    server = MemoryServer(MemoryReady("memory-0", 1, 9, "0.1.0", gpu), last_seen_s=NOW_S, joined_s=NOW_S - 90_000)
    server.beat = MemoryHeartbeat("memory-0", 1, 8_040_000_000, 29_000_000_000, 1000, 400, 300, 0, 0, 0, 0, 0, 0, 0, ())
    changes = RoleChanges(Incidents(), lambda: NOW_S - 12.0)
    why = "prefill-1 on cuda:0 becomes decode-2: 492 of 512 rows"
    changes.note(RoleChange("operator", 1, "prefill-1", "decode-2", Role.DECODE, Stage.BEGUN, why))
    changes.note(RoleChange("operator", 1, "prefill-1", "decode-2", Role.DECODE, Stage.DONE, "after 5.0 s"))
    return report(pool, [server], changes, draining=False, now_s=NOW_S)


def test_each_has_a_line_and_what_is_wrong_stands_below() -> None:
    lines = fleet_table(health()).splitlines()
    assert [line.split()[:2] for line in lines[1:5]] == [
        ["prefill", "prefill-0"], ["decode", "decode-0"], ["decode", "decode-1"], ["memory", "memory-0"],
    ]  # fmt: skip
    assert "cuda:0 NVIDIA H200  serving" in lines[1] and "feb60d5f" not in lines[1] and lines[1].endswith("5 s")
    assert "0 of 8 sequences" in lines[2] and "5 in use" in lines[2] and lines[2].endswith("1 min 1 s")
    assert "standby" in lines[3] and lines[3].endswith("2 h 1 min")
    assert "8.04 GB of weights, 29.0 GB left" in lines[4] and "600 of 1,000 in use, 300 cached" in lines[4]
    assert lines[4].endswith("1 d 1 h")
    assert any("prefill-0 -> decode-0: no way" in line for line in lines[5:])
    assert lines[-1] == "12 s ago, done: prefill-1 on cuda:0 becomes decode-2: 492 of 512 rows"


def test_another_body_is_told() -> None:
    with pytest.raises(KeyError):
        fleet_table({"status": "ok"})


def test_what_a_terminal_would_obey_is_shown() -> None:
    body = health() | {"missing": ["\x1b[2J\ud800"]}
    assert "\\x1b[2J\\ud800" in fleet_table(body)
