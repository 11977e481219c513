"""MPS with a stand-in for its control program: a script on PATH whose daemon detaches as the real one does."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from common.base.errors import ConfigError
from common.base.json_file import JsonObject
from common.settings.config import Config, ModelSection, PrefillSection
from common.settings.options import parse
from deploy.autoscale.judge import Pace
from deploy.autoscale.options import AutoscaleOptions
from deploy.cli import ALL_SECTIONS
from deploy.processes import mps
from deploy.processes.console import Console
from deploy.processes.launch_plan import SOURCE_ROOT, ProcessSpec
from deploy.processes.mps import NO_MPS, Mps, MpsOptions, open_mps, shared_gpus
from deploy.processes.placement import Gpu, Placement, place_workers
from deploy.processes.runtime_dir import make_runtime_dir
from deploy.serve.command import Fleet, prepared, ready_text
from deploy.serve.demo import DEMO_MODEL

ONE_GPU = place_workers(1, 1, [Gpu(0, 0)])
TWO_GPUS = place_workers(1, 1, [Gpu(0, 0), Gpu(1, 0)])
THREE_ON_TWO = place_workers(2, 1, [Gpu(0, 0), Gpu(1, 0)])
DEADLINE_S = 60.0

CONTROL = """#!{python} -IS
import json, os, pathlib, signal, subprocess, sys, time

home = pathlib.Path(__file__).parent
mode = (home / "mode").read_text()
directory = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
pid_file = directory / "pid"
if sys.argv[1:] == ["-d"]:
    (home / "environ").write_text(json.dumps(dict(os.environ)))
    if mode == "refuses":
        sys.exit("cannot make a directory")
    if mode == "hangs":
        time.sleep(60)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    daemon = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)  # and keeps our output open
    pid_file.write_text(str(daemon.pid))
    (home / "pid").write_text(str(daemon.pid))
    os._exit(0)
command = sys.stdin.read().strip()
with (home / "commands").open("a") as commands:
    commands.write(command + "\\n")
if not pid_file.exists():
    sys.exit("Cannot find MPS control daemon process")
if command == "get_default_active_thread_percentage":
    print(100.0)
if command == "quit" and mode != "stays":
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
"""


class FakeMps:
    """A directory for PATH with the stand-in; `mode` is one of "", "refuses", "hangs", "stays"."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.log = io.StringIO()
        self.environ = {"PATH": f"{directory}{os.pathsep}{os.environ['PATH']}"}
        self.monkeypatch = monkeypatch
        script = directory / mps.CONTROL
        script.write_text(CONTROL.format(python=sys.executable))
        script.chmod(0o755)
        self.set_mode("")
        self.set_probe("")
        monkeypatch.setattr(mps, "DEFAULT_PIPE_DIRECTORY", directory / "default")

    def set_mode(self, mode: str) -> None:
        (self.directory / "mode").write_text(mode)

    def set_probe(self, problem: str) -> None:
        probe = self.directory / "probe.py"
        probe.write_text(f"import sys\nsys.exit({problem!r} or 0)\n")
        self.monkeypatch.setattr(mps, "PROBE", probe)

    @contextlib.asynccontextmanager
    async def open(
        self, options: MpsOptions | None = None, placements: Sequence[Placement] = ONE_GPU, **environ: str
    ) -> AsyncIterator[Mps]:
        console = Console(self.log, None)
        with make_runtime_dir() as runtime_dir:
            given = self.environ | environ
            async with open_mps(options or MpsOptions(), placements, given, runtime_dir, console) as opened:
                yield opened

    @property
    def was_started(self) -> bool:
        return (self.directory / "environ").exists()

    def daemon_environ(self) -> dict[str, str]:
        environ: dict[str, str] = json.loads((self.directory / "environ").read_text())
        return environ

    def daemon_runs(self) -> bool:
        return is_alive(int((self.directory / "pid").read_text()))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMps:
    return FakeMps(tmp_path, monkeypatch)


def test_a_gpu_is_shared_by_one_of_each_kind() -> None:
    assert shared_gpus(ONE_GPU) == [0]
    assert shared_gpus(TWO_GPUS) == []
    assert shared_gpus(THREE_ON_TWO) == [0]
    assert shared_gpus(place_workers(2, 2, [Gpu(0, 0), Gpu(1, 0)])) == [0, 1]
    assert shared_gpus(place_workers(0, 2, [Gpu(0, 0)])) == []
    assert shared_gpus(place_workers(1, 1, [])) == []


async def test_a_private_daemon_lives_as_long_as_the_context(fake: FakeMps) -> None:
    async with fake.open() as opened:
        assert set(opened.environ) == {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"}
        assert all(Path(directory).stat().st_mode & 0o777 == 0o700 for directory in opened.environ.values())
        assert opened.environ.items() <= fake.daemon_environ().items()
        assert opened.flags == {"prefill-0": ("--prefill-sm-share", "80")}
        assert opened.text == "MPS, prompts capped at 80 % of the SMs while others are served"
        assert fake.daemon_runs()
    assert not fake.daemon_runs()
    assert (fake.directory / "commands").read_text().split() == ["get_default_active_thread_percentage", "quit"]


async def test_one_daemon_serves_all_gpus_and_only_prefill_beside_decode_is_capped(fake: FakeMps) -> None:
    async with fake.open(MpsOptions("on", 40), THREE_ON_TWO) as opened:
        assert opened.flags == {"prefill-0": ("--prefill-sm-share", "40")}


@pytest.mark.parametrize(("visible", "given"), [("2,3", None), ("GPU-aa,GPU-bb", "GPU-aa,GPU-bb")])
async def test_gpus_are_not_renumbered_twice(fake: FakeMps, visible: str, given: str | None) -> None:
    async with fake.open(CUDA_VISIBLE_DEVICES=visible):
        assert fake.daemon_environ().get("CUDA_VISIBLE_DEVICES") == given
        assert fake.daemon_environ()["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize("placements", [TWO_GPUS, place_workers(1, 1, [])], ids=["a GPU each", "cpu"])
async def test_nothing_is_done_where_no_gpu_is_shared(fake: FakeMps, placements: Sequence[Placement]) -> None:
    async with fake.open(MpsOptions("on"), placements) as opened:
        assert opened == Mps()
    assert not fake.was_started
    assert fake.log.getvalue() == ""


@pytest.mark.parametrize("options", [MpsOptions("off"), MpsOptions("auto", 0)])
async def test_switched_off(fake: FakeMps, options: MpsOptions) -> None:
    async with fake.open(options) as opened:
        assert opened == NO_MPS
    assert not fake.was_started
    assert "MPS is switched off: decode steps share the GPU by time slices" in fake.log.getvalue()


async def test_absent_is_said_with_its_cost_or_refused(fake: FakeMps) -> None:
    async with fake.open(PATH="/nowhere") as opened:
        assert opened == NO_MPS
    expected = "no MPS: nvidia-cuda-mps-control is not on PATH; decode steps share the GPU by time slices"
    assert expected in fake.log.getvalue()
    with pytest.raises(ConfigError, match="is not on PATH; --mps auto goes on without"):
        async with fake.open(MpsOptions("on"), PATH="/nowhere"):
            pass


@pytest.mark.parametrize(
    ("mode", "probe", "reason"),
    [
        ("refuses", "", "nvidia-cuda-mps-control ended with exit code 1: cannot make a directory"),
        (
            "",
            "CUDA error 805 on GPU 0",
            "a trial client failed: python.* ended with exit code 1: CUDA error 805 on GPU 0",
        ),
    ],
)
async def test_a_daemon_that_cannot_serve_is_done_without_or_refused(
    fake: FakeMps, mode: str, probe: str, reason: str
) -> None:
    fake.set_mode(mode)
    fake.set_probe(probe)
    async with fake.open() as opened:
        assert opened == NO_MPS
    assert re.search(rf" W \[baton\] no MPS: {reason}; {mps.COST}", fake.log.getvalue())
    with pytest.raises(ConfigError, match=reason):
        async with fake.open(MpsOptions("on")):
            pass
    assert mode or not fake.daemon_runs()


@pytest.mark.medium
async def test_a_control_program_that_hangs_holds_nobody_up(fake: FakeMps) -> None:
    fake.set_mode("hangs")
    fake.monkeypatch.setattr(mps, "START_DEADLINE_S", 1.0)
    fake.monkeypatch.setattr(mps, "STOP_DEADLINE_S", 0.5)
    async with fake.open() as opened:
        assert opened == NO_MPS
    assert "did not start within 1 s" in fake.log.getvalue()
    assert "did not end within 0.5 s" in fake.log.getvalue()


async def test_a_daemon_that_the_user_names_is_used_and_left_alone(fake: FakeMps, tmp_path: Path) -> None:
    async with fake.open(CUDA_MPS_PIPE_DIRECTORY=str(tmp_path)) as opened:
        assert opened.environ == {}
        assert opened.flags == {"prefill-0": ("--prefill-sm-share", "80")}
        assert opened.text.startswith("MPS")
    assert not fake.was_started
    assert not (fake.directory / "commands").exists()


@pytest.mark.parametrize("answers", [True, False])
async def test_a_daemon_in_the_default_directory_is_used_only_if_it_answers(fake: FakeMps, answers: bool) -> None:
    default = fake.directory / "default"
    default.mkdir()
    (default / "control").touch()
    script = fake.directory / mps.CONTROL
    asks_default = 'os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or str(home / "default")'
    script.write_text(script.read_text().replace('os.environ["CUDA_MPS_PIPE_DIRECTORY"]', asks_default))
    if answers:
        (default / "pid").write_text("1")
    async with fake.open() as opened:
        assert fake.was_started is not answers
        assert ("CUDA_MPS_PIPE_DIRECTORY" in opened.environ) is not answers
        assert "prefill-0" in opened.flags
    if answers:
        assert "quit" not in (fake.directory / "commands").read_text()
    else:
        assert not fake.daemon_runs()


@pytest.mark.parametrize("percent", [-1, 101])
def test_percentages_are_checked(percent: int) -> None:
    with pytest.raises(ConfigError, match="1 to 100, or 0 for no MPS"):
        MpsOptions("auto", percent)


OPENER = """
import asyncio, os, sys
from pathlib import Path
from deploy.processes import mps
from deploy.cli import ALL_SECTIONS
from deploy.processes.console import Console
from deploy.processes.placement import Gpu, place_workers

mps.PROBE = Path(sys.argv[1])
mps.DEFAULT_PIPE_DIRECTORY = Path("/nowhere")

async def main():
    workers = place_workers(1, 1, [Gpu(0, 0)])
    async with mps.open_mps(mps.MpsOptions("on"), workers, os.environ, Path(sys.argv[2]), Console(sys.stderr, None)):
        print("open", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def test_no_daemon_outlives_a_supervisor_that_was_killed(fake: FakeMps, tmp_path: Path) -> None:
    command = [sys.executable, "-c", OPENER, str(mps.PROBE), str(tmp_path)]
    environ = os.environ | fake.environ
    environ.pop("CUDA_MPS_PIPE_DIRECTORY", None)
    with subprocess.Popen(command, cwd=SOURCE_ROOT, env=environ, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "open\n"
        assert fake.daemon_runs()
        supervisor.kill()
    deadline_s = time.monotonic() + DEADLINE_S
    while fake.daemon_runs():
        assert time.monotonic() < deadline_s, "the daemon outlived its supervisor"
        time.sleep(0.02)


GUARDED = """
import os, time
from deploy.processes import mps_guard
mps_guard.adopt_orphans()
assert mps_guard.start_daemon(os.environ) == ""
mps_guard.run([mps_guard.CONTROL], os.environ, 10, "quit")
mps_guard.end_adopted(time.monotonic() + 0.2)
"""


def test_a_daemon_that_does_not_quit_is_killed(fake: FakeMps, tmp_path: Path) -> None:
    fake.set_mode("stays")
    environ = os.environ | fake.environ | {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    subprocess.run([sys.executable, "-c", GUARDED], cwd=SOURCE_ROOT, env=environ, check=True, timeout=DEADLINE_S)
    assert not fake.daemon_runs()


def sm_share(spec: ProcessSpec) -> int:
    """What the process reads from its flags."""
    return parse(Config, ALL_SECTIONS, spec.name, "", spec.flags).prefill.sm_share


async def test_workers_get_it_and_the_operator_reads_it(fake: FakeMps) -> None:
    fake.monkeypatch.setattr("deploy.serve.command.detect_gpus", lambda environ: [Gpu(0, 0)])
    for name, value in fake.environ.items():
        fake.monkeypatch.setenv(name, value)
    fake.monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    config = Config(model=ModelSection(path=str(DEMO_MODEL)))
    async with prepared(config, Fleet(1, 1, "", 10.0), Console(fake.log, None)) as (supervisor, opened):
        environs = {spec.name: spec.env for spec in supervisor._specs}
        assert environs == {"router": {}} | dict.fromkeys(["memory-0", "prefill-0", "decode-0"], opened.environ)
        shares = {spec.name: sm_share(spec) for spec in supervisor._specs}
        assert shares == {"router": 100, "memory-0": 100, "prefill-0": 80, "decode-0": 100}
    config = replace(config, prefill=PrefillSection(sm_share=60))
    async with prepared(config, Fleet(1, 1, "", 10.0), Console(fake.log, None)) as (supervisor, _):
        assert sm_share(supervisor._specs[2]) == 60, "what the user set wins"
    fake.monkeypatch.setattr("deploy.serve.command.detect_gpus", lambda environ: [Gpu(0, 0), Gpu(1, 0), Gpu(2, 0)])
    fleet = Fleet(1, 2, "", 10.0, autoscale=AutoscaleOptions(Pace()))
    async with prepared(config, fleet, Console(fake.log, None)) as (_, changing):
        assert "prefill-1" in changing.flags, "where roles change, both may be on any of their GPUs for a while"
    health: JsonObject = {"status": "ok", "problems": [], "workers": {}, "kv_paths": []}
    assert ready_text(config, health, opened).splitlines()[0].endswith(opened.text)
    assert "no MPS (decode steps share the GPU by time slices)" in ready_text(config, health, NO_MPS)
    assert "MPS" not in ready_text(config, health, Mps())
    degraded = health | {"status": "degraded", "problems": ["no way"]}
    assert "\n  degraded: no way" in ready_text(config, degraded, Mps())


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which(mps.CONTROL) is None, reason="no nvidia-cuda-mps-control here")
async def test_the_real_daemon_serves_and_ends(tmp_path: Path) -> None:
    log = io.StringIO()
    with make_runtime_dir() as runtime_dir:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_MPS_")}
        async with open_mps(MpsOptions("on"), ONE_GPU, environ, runtime_dir, Console(log, None)) as opened:
            directory = Path(opened.environ.get("CUDA_MPS_PIPE_DIRECTORY", mps.DEFAULT_PIPE_DIRECTORY))
            daemon = int((directory / "nvidia-cuda-mps-control.pid").read_text())
            assert is_alive(daemon)
    assert "using the MPS daemon that is already there" in log.getvalue() or not is_alive(daemon)
