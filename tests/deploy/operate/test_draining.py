import json
import subprocess
import sys
from pathlib import Path

import pytest

from common.base.errors import ConfigError
from common.settings.config import NetSection
from common.wire.transport import endpoints, whereabouts
from deploy.operate import draining
from deploy.operate.draining import drain, router_of


def test_a_router_is_found_by_its_port_unless_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "PARENT", tmp_path)
    usual = NetSection()
    assert router_of(usual, None) == usual
    whereabouts.note(8000, f"ipc://{tmp_path}/r.sock", NetSection(secret_file="s"))
    found = router_of(usual, 8000)
    assert found == router_of(usual, None) == router_of(usual, None, "http://localhost:8000/")
    assert found.router_endpoint == f"ipc://{tmp_path}/r.sock" and found.secret_file == str(Path("s").absolute())
    named = NetSection(router_endpoint="ipc:///elsewhere.sock")
    assert router_of(named, 8000) == named
    whereabouts.forget(8000)
    assert router_of(usual, None) == usual


def test_a_port_without_a_router_leads_to_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "PARENT", tmp_path)
    whereabouts.note(8000, f"ipc://{tmp_path}/r.sock", NetSection())
    with pytest.raises(ConfigError, match="--port 8001: no router of this user has it"):
        router_of(NetSection(), 8001)
    for url in ("http://127.0.0.1:8001", "http://elsewhere:8000", "http://[::1", "8000"):
        with pytest.raises(ConfigError, match=r"--url .*: no router of this user has it"):
            router_of(NetSection(), None, url)


def test_notes_of_killed_routers_are_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "PARENT", tmp_path)
    directory, argv = endpoints.private_directory(), [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(argv) as living, subprocess.Popen(argv) as killed:
        for number, pid in enumerate((living.pid, killed.pid)):
            (directory / f"router-800{number}.json").write_text(json.dumps({"pid": pid}))
            (directory / f"router-800{number}.{pid}").write_text("{")  # as it was writing
        killed.kill()
        killed.wait()
        (directory / "router-9000.json").write_text("{}")
        whereabouts.note(8002, f"ipc://{tmp_path}/r.sock", NetSection())
        kept = {path.name for path in directory.iterdir()}
        living.kill()
    assert kept == {"router-8000.json", f"router-8000.{living.pid}", "router-8002.json", "router-9000.json"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": 1}', "\xff{"])
def test_a_note_that_says_nothing_is_none(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "PARENT", tmp_path)
    (endpoints.private_directory() / "router-8000.json").write_text(text, encoding="latin-1")
    assert whereabouts.found(8000) is None
    whereabouts.forget(8000)
    assert (endpoints.private_directory() / "router-8000.json").exists(), "it is not ours"


@pytest.mark.medium
def test_nobody_answers_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "ANSWER_S", 0.2)
    said: list[str] = []
    net = NetSection(router_endpoint=f"ipc://{tmp_path}/nobody.sock")
    assert drain(net, "decode-0", 60.0, said.append) == 1
    assert f"no router answers at ipc://{tmp_path}/nobody.sock within 0.2 s" in said[0]
