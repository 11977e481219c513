"""A service manager hears when requests are served, and the unit starts what there is to start."""

import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from deploy.cli import build_parser
from deploy.serve.command import notify_ready

UNIT = Path(__file__).parents[3] / "deploy" / "systemd" / "baton@.service"


def test_who_waits_hears_that_it_serves_and_where_nobody_waits_nothing_happens(tmp_path: Path) -> None:
    path = tmp_path / "notify.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        notify_ready({"NOTIFY_SOCKET": str(path)})
        assert manager.recv(100) == b"READY=1"
    notify_ready({})
    notify_ready({"NOTIFY_SOCKET": str(tmp_path / "nobody.sock")})


def test_the_unit_starts_a_command_that_there_is_and_restarts_it_only_when_it_failed() -> None:
    unit = UNIT.read_text(encoding="utf-8")
    (command,) = re.findall(r"(?m)^ExecStart=/opt/baton/%i/\.venv/bin/baton (.*)$", unit)
    args = build_parser().parse_args(command.replace("$BATON_SERVE", "owner/name --prefill 2").split())
    assert getattr(args, "router.take_over") == "auto" and args.prefill == 2
    assert "\nRestart=on-failure\n" in unit, "an instance whose port another has ends with 0, and stays down"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text(encoding="utf-8").replace("/opt/baton/%i/.venv/bin/baton", "/bin/true")
    (tmp_path / "baton@blue.service").write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "baton@blue.service")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
