import json
import socket
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from common.memory.devices.host_backing import HostBacking
from common.memory.server.server import MemoryServer
from common.settings.memory_sections import MemorySection
from deploy import cli
from deploy.operate import healthcheck
from deploy.operate.healthcheck import fetch, main, problem
from tests.support.announcing import announcer
from tests.support.answering import answering


def body(status: str, problems: list[str]) -> dict[str, Any]:
    return {"status": status, "problems": problems, "workers": {"prefill": [{"id": "p"}], "decode": []}}


def test_a_router_is_healthy_when_it_can_serve() -> None:
    assert problem(body("ok", []), []) == ""
    assert problem(body("degraded", ["no prefill worker"]), []) == "", "it answers: no probe is to end it"
    assert problem(body("unavailable", ["no decode worker"]), []) == "unavailable: no decode worker"


def test_a_worker_is_healthy_when_the_router_knows_it() -> None:
    assert problem(body("unavailable", []), ["p"]) == ""
    assert problem(body("ok", []), ["d"]) == "the router does not know d"
    assert problem(body("ok", []), ["p", "d", "e"]) == "the router does not know d, e"


@pytest.mark.parametrize(("role", "said"), [("decode", "ok"), ("prefill", "the router does not know prefill-")])
def test_a_container_asks_for_its_own_worker(role: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    known = {"status": "ok", "problems": [], "workers": {"decode": [{"id": f"decode-{socket.gethostname()}"}]}}
    with answering(HEAD + json.dumps(known).encode()) as url:
        assert main([url, role]) == (said != "ok")
    assert capsys.readouterr().out.startswith(said)


def test_nobody_there_is_unhealthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["http://127.0.0.1:9"]) == 1
    assert "refused" in capsys.readouterr().out


HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
OTHERS = [b"SSH-2.0-OpenSSH_9.2\r\n", HEAD + b"<html>", HEAD + b"[" * 100_000, HEAD + b"[]", HEAD + b"{}"]


@pytest.mark.parametrize("answer", [*OTHERS, HEAD + b'{"workers": []}', HEAD + b'{"workers": {}, "status": 3}'])
def test_another_program_is_no_router(
    answer: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(answer) as url:
        assert main([url, "worker-0"]) == 1
    with answering(answer) as url, pytest.raises(SystemExit, match="1"):
        monkeypatch.setattr(sys, "argv", ["baton", "workers", "--url", url])
        cli.main()
    assert "no router of this version" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_bytes", "why"), [(1 << 20, "no whole answer within 0.5 s|timed out"), (64, "more than 64 bytes")]
)
def test_an_answer_without_end_is_not_read_for_ever(num_bytes: int, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healthcheck, "DEADLINE_S", 0.5)
    monkeypatch.setattr(healthcheck, "MAX_BYTES", num_bytes)
    with answering(HEAD + b"[1,", times=64) as url, pytest.raises((OSError, ValueError), match=why):
        fetch(url)


@pytest.mark.parametrize("url", ["", "router", "ftp://a", "file:///etc/passwd", "http://", "http://a b", "http://a:b"])
def test_a_url_is_one_of_http(url: str) -> None:
    with pytest.raises(ValueError, match=r"a URL is like|[Pp]ort"):
        fetch(url)


def test_proxies_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with answering(HEAD + b'{"status": "ok"}') as url:
        assert fetch(url) == {"status": "ok"}


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
