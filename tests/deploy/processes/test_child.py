import asyncio
import io
import os
import signal
from pathlib import Path

import pytest

from deploy.processes.child import Backoff, Child, describe_exit
from deploy.processes.console import Console
from deploy.processes.exec_child import child_environment
from deploy.processes.launch_plan import SOURCE_ROOT, Kind, ProcessSpec


def test_backoff_doubles_to_its_limit_and_forgives_a_long_life() -> None:
    backoff = Backoff()
    assert [backoff.after(1.0) for _ in range(9)] == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]
    assert backoff.num_crashes == 9
    assert [backoff.after(30.0), backoff.after(1.0)] == [0, 0.5]
    assert backoff.num_crashes == 2


@pytest.mark.parametrize(("code", "expected"), [(0, "exit code 0"), (2, "exit code 2"), (-9, "signal SIGKILL")])
def test_describe_exit(code: int, expected: str) -> None:
    assert describe_exit(code) == expected


def test_a_child_keeps_the_users_environment() -> None:
    environ = child_environment({"PYTHONPATH": "/mine", "CUDA_DEVICE_ORDER": "FASTEST_FIRST", "HOME": "/home"})
    assert environ["PYTHONPATH"] == f"{SOURCE_ROOT}:/mine"
    assert environ["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
    assert environ["HOME"] == "/home"


def test_threads_that_wait_leave_their_core_to_others_unless_the_user_says_else() -> None:
    assert child_environment({})["OMP_WAIT_POLICY"] == "PASSIVE"
    assert child_environment({"OMP_WAIT_POLICY": "ACTIVE"})["OMP_WAIT_POLICY"] == "ACTIVE"


async def test_a_child_gets_what_its_spec_adds(tmp_path: Path) -> None:
    (tmp_path / "stand_in.py").write_text("import os; print(os.environ['CAP'], os.environ['HOME'])")
    log = io.StringIO()
    spec = ProcessSpec("worker", "stand_in", (), Kind.WORKER, {"CAP": "60", "HOME": "/theirs"})
    child = await Child.start(spec, {"PYTHONPATH": str(tmp_path), "HOME": "/home"}, Console(log, None))
    assert await asyncio.wait_for(child.ended(), 60) == 0
    assert log.getvalue() == "60 /theirs\n"


@pytest.mark.medium
async def test_an_end_is_known_while_somebody_else_still_writes(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys; print(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid); sys.exit(3)"
    )
    (tmp_path / "stand_in.py").write_text(program)
    log = io.StringIO()
    spec = ProcessSpec("worker", "stand_in", (), Kind.WORKER)
    child = await Child.start(spec, {"PYTHONPATH": str(tmp_path)}, Console(log, None))
    assert await asyncio.wait_for(child.ended(), 60) == 3
    os.kill(int(log.getvalue()), signal.SIGKILL)
