import socket
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from common.memory.host_backing import HostBacking
from common.memory.server import MemoryServer
from common.memory_sections import MemorySection
from deploy import healthcheck
from deploy.healthcheck import main, problem
from tests.announcing import announcer


def body(status: str, missing: list[str]) -> dict[str, Any]:
    return {"status": status, "missing": missing, "workers": {"prefill": [{"id": "p"}], "decode": []}}


def test_a_router_is_healthy_when_it_can_serve() -> None:
    assert problem(body("ok", []), "") == ""
    assert problem(body("unavailable", ["no decode worker"]), "") == "unavailable: no decode worker"


def test_a_worker_is_healthy_when_the_router_knows_it() -> None:
    assert problem(body("unavailable", []), "p") == ""
    assert problem(body("ok", []), "d") == "the router does not know d"


def test_nobody_there_is_unhealthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["http://127.0.0.1:9"]) == 1
    assert "refused" in capsys.readouterr().out


def test_a_memory_server_is_healthy_while_its_loop_turns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    unheard = announcer()
    server = MemoryServer(tmp_path / "socket", HostBacking(), unheard, MemorySection())
    thread = Thread(target=server.run)
    thread.start()
    try:
        assert main([str(tmp_path / "socket")]) == 0
        assert main([f"{tmp_path}/"]) == 1, "no memory server's socket has that name"
        (tmp_path / "memory-cpu.sock").symlink_to("socket")
        assert main([f"{tmp_path}/"]) == 0
    finally:
        server.stop()
        thread.join(60)
        server.close()
        unheard.close()
    assert not server.clients
    assert not caplog.records, "a probe every few seconds leaves no word in the log"


def test_a_memory_server_that_hangs_or_is_gone_is_unhealthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(healthcheck, "DEADLINE_S", 0.05)
    path = tmp_path / "socket"
    assert main([str(path)]) == 1
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as hangs:
        hangs.bind(str(path))
        hangs.listen()
        assert main([str(path)]) == 1
    assert main([str(path)]) == 1, "its file outlives it"
    assert [line.rpartition("]")[2].strip() for line in capsys.readouterr().out.splitlines()] == [
        "No such file or directory", "timed out", "Connection refused",
    ]  # fmt: skip
