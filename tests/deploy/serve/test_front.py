"""`baton front` as a user starts it: from any folder, whatever stands there."""

import os
import subprocess
import sys
from pathlib import Path

from deploy.bench.origin import ROOT
from deploy.serve.demo import DEMO_MODEL

FRONT = ("-P", "-m", "deploy", "front", str(DEMO_MODEL))


def run_front(folder: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *FRONT, *flags]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False)


def test_a_folder_with_the_name_of_a_room_is_no_part_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "router").mkdir()
    (tmp_path / "router" / "__init__.py").write_text("raise SystemExit('a stranger was imported')\n")
    ended = run_front(tmp_path, "--dispatcher", "tcp://127.0.0.1:5999")
    assert ended.returncode == 2 and "set net.secret_file on every process" in ended.stderr, ended.stderr


def test_a_front_needs_a_dispatcher(tmp_path: Path) -> None:
    ended = run_front(tmp_path)
    assert ended.returncode == 2 and "baton front needs --dispatcher" in ended.stderr, ended.stderr
