import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.processes.launch_plan import SOURCE_ROOT
from deploy.processes.runtime_dir import make_runtime_dir, remove_abandoned

HOLD = """
import sys, tempfile, time
from deploy.processes.runtime_dir import make_runtime_dir
tempfile.tempdir = sys.argv[1]
with make_runtime_dir() as path:
    (path / "router.sock").touch()
    print(path, flush=True)
    time.sleep(60)
"""


def test_it_is_short_private_and_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long_parent = tmp_path / ("d" * 80)
    long_parent.mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(long_parent))
    with make_runtime_dir() as path:
        assert len(str(path)) < 40
        assert path.stat().st_mode & 0o777 == 0o700
    assert not path.exists()


def test_what_a_killed_supervisor_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(argv, cwd=SOURCE_ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        new, other = tmp_path / "baton-serve-new", tmp_path / "baton-1000"
        new.mkdir()
        other.mkdir()
        for path in (left, other):
            os.utime(path, (0, 0))
        remove_abandoned(tmp_path)
        assert left.exists(), "its supervisor lives"
        process.send_signal(signal.SIGKILL)
    remove_abandoned(tmp_path)
    assert sorted(tmp_path.iterdir()) == [other, new]
