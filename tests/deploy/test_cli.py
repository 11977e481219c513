import re
import subprocess
import sys
from typing import Any

import pytest

from common.settings.config import Config
from common.settings.options import from_flags
from deploy.autoscale.judge import Pace
from deploy.autoscale.options import AutoscaleOptions, autoscale_of
from deploy.cli import build_parser, main
from deploy.processes.launch_plan import SOURCE_ROOT
from deploy.processes.machine import shortage
from deploy.serve.demo import DEMO_MODEL
from deploy.serve.fleet_options import fleet_of


def test_serve_takes_short_flags_and_every_option() -> None:
    argv = "serve some/dir --host 0.0.0.0 --port 9000 --device cpu --prefill 2 --kv-block-size 32 --log-level DEBUG"
    argv += " --trace t"
    args = build_parser().parse_args(argv.split())
    config = from_flags(Config, args)
    assert (config.model.path, config.router.host, config.router.port) == ("some/dir", "0.0.0.0", 9000)
    assert config.trace.dir == "t"
    assert (config.worker.device, config.kv.block_size, config.log.level) == ("cpu", 32, "DEBUG")
    assert (args.prefill, args.decode) == (2, 1)
    assert (args.mps, args.mps_prefill_percent) == ("auto", 80)


def test_a_wrong_setting_exits_with_2_and_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["baton", "serve", "/no/such/dir"])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2
    assert "'/no/such/dir' is neither a directory nor a Hub id" in capsys.readouterr().err


ROUTER = "--net-router-endpoint tcp://10.0.0.1:5570"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (f"{ROUTER} --net-advertise 10.0.0.2", r"no workers: set --prefill, --decode, or both"),
        ("--decode 1 --net-advertise 10.0.0.2", r"net\.router_endpoint: name the router to join"),
        (f"{ROUTER} --decode 1", r"net\.advertise: name this host as others reach it"),
        (f"{ROUTER} --prefill 1 --kv-transport none", r"nothing would be handed off"),
        (f"{ROUTER} --net-advertise b --decode 1 --standby both", r"there are no prefill workers to stand by for"),
        (
            f"{ROUTER} --net-advertise b --decode 1 --worker-id mine",
            r"worker\.id and worker\.memory_socket are for one",
        ),
        (f"{ROUTER} --router-port 80", r"baton join: error: unrecognized arguments: --router-port"),
    ],
)
def test_a_host_that_could_not_join_is_told_so(
    argv: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["baton", "join", str(DEMO_MODEL), *argv.split()])
    monkeypatch.setattr("deploy.cli.join", None)
    with pytest.raises(SystemExit, match="2"):
        main()
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--prefill -1", r"--prefill: -1: 0 to 256"),
        ("--prefill 0", r"--prefill 0 and kv\.transport = auto: .*leave --prefill out"),
        ("--prefill 2 --kv-transport none", r"--prefill 2 and kv\.transport = none"),
        ("--decode 0", r"--decode: 0: 1 to 256"),
        ("--decode many", r"--decode: many: 1 to 256"),
        ("--start-timeout-s nan", r"--start-timeout-s: nan: 1 to 86400"),
        ("--mps-prefill-percent 101", r"--mps-prefill-percent: 101: 0 to 100"),
        ("--port 65536", r"router\.port = 65536: 0 to 65535"),
        ("--router-request-timeout-s nan", r"router\.request_timeout_s = nan: 1 to 604800"),
        ("--decode-max-pulls 0", r"decode\.max_pulls = 0: 1 to 1024"),
        ("--standby prefill --kv-transport none", r"--standby prefill: there are no prefill workers"),
        ("--worker-standby 1", r"worker\.standby = 1: .*--standby"),
        ("--autoscale", r"--autoscale with 1 prefill and 1 decode worker: one of each stays"),
        ("--autoscale --kv-transport none --decode 4", r"--autoscale without prefill workers .*kv\.transport = none"),
        ("--autoscale --prefill 0 --decode 4 --net-advertise h", r"--autoscale without prefill workers \(--prefill 0"),
        ("--decode 2 --autoscale-step-ms 20", r"--autoscale-step-ms does nothing without --autoscale"),
        ("--decode 2 --autoscale --autoscale-window-s 0.5", r"0\.5: 1 to 3600"),
        ("--decode 2 --autoscale --autoscale-cooldown-s -1", r"-1: 0 to 86400"),
        ("--memory-device cuda:1", r"memory\.linger_s are for one memory server"),
        ("--worker-id mine", r"worker\.id and worker\.memory_socket are for one worker, and chosen here"),
        ("--gpu 0", r"baton serve: error: unrecognized arguments: --gpu 0; did you mean --gpus\?"),
        ("--kv-blocksize=32 --zzz", r"--kv-blocksize=32 --zzz; did you mean --kv-block-size\?"),
        ("--zzz", r"unrecognized arguments: --zzz; --help lists what there is"),
        ("--model-max-len 1", r"model\.max_len = 1: a prompt and its output are 2 tokens at least"),
        ("--device gpu", r"worker\.device = 'gpu': auto, cpu, cuda or cuda:N"),
    ],
)
def test_settings_that_serve_nothing_are_refused_before_anything_starts(
    argv: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["baton", "serve", str(DEMO_MODEL), *argv.split()])
    monkeypatch.setattr("deploy.cli.serve", None)
    with pytest.raises(SystemExit, match="2"):
        main()
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("argv", "num_prefill"),
    [("", 1), ("--prefill 3", 3), ("--kv-transport none", 0), ("--prefill 0 --net-advertise 10.0.0.1", 0)],
)
def test_prefill_workers_follow_the_transport(argv: str, num_prefill: int) -> None:
    args = build_parser().parse_args(["serve", "m", *argv.split()])
    assert fleet_of(args, from_flags(Config, args)).num_prefill == num_prefill


def test_the_supervisor_never_imports_torch() -> None:
    code = "import deploy.cli, sys; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=SOURCE_ROOT, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--decode 2", None),
        ("--decode 2 --autoscale", AutoscaleOptions(Pace(10.0, 120.0))),
        ("--decode 2 --autoscale --autoscale-window-s 5 --autoscale-cooldown-s 60 --autoscale-step-ms 25",
         AutoscaleOptions(Pace(5.0, 60.0), 25.0)),
    ],
)  # fmt: skip
def test_roles_change_only_where_that_is_asked_for(argv: str, expected: AutoscaleOptions | None) -> None:
    args = build_parser().parse_args(["serve", "m", *argv.split()])
    assert autoscale_of(args, 1, args.decode) == expected


@pytest.mark.parametrize("name", ["", "a b", "a\nb", "x" * 101, "\u00fc"])
def test_a_name_that_nobody_has_is_not_sent_to_a_router(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        build_parser().parse_args(["drain", name])
    assert "1 to 100 ASCII characters" in capsys.readouterr().err


def test_who_reads_no_further_sees_no_error() -> None:
    command = [sys.executable, "-m", "deploy.cli", "serve", str(DEMO_MODEL), "--print-config"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == (b"", 141)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("argv", "full", "status"),
    [("serve /no/such/dir", "stderr", 2), ("serve --zzz", "stderr", 2),
     ("workers --url http://127.0.0.1:1", "stderr", 1), (f"serve {DEMO_MODEL} --print-config", "stdout", 1)],
)  # fmt: skip
def test_a_disk_that_is_full_changes_no_status(argv: str, full: str, status: int) -> None:
    with open("/dev/full", "wb") as device:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {full: device}
        ended = subprocess.run([sys.executable, "-m", "deploy", *argv.split()], timeout=60, check=False, **streams)
    assert ended.returncode == status
    if full == "stdout":
        assert ended.stderr == b"baton: [Errno 28] No space left on device\n"


def test_streams_that_are_closed_lead_nowhere() -> None:
    """What is opened first would get their descriptors, and what is printed."""
    code = "import os, deploy.__main__ as entry; entry.open_streams(); print('nowhere', flush=True); os._exit(7)"
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
    assert subprocess.run(closed, cwd=SOURCE_ROOT, timeout=60, check=False).returncode == 7


@pytest.mark.parametrize(
    ("happens", "status", "said"),
    [("os.kill(os.getpid(), signal.SIGINT)", 130, "baton: interrupted\n"),
     ("raise MemoryError", 1, "baton: cannot start: MemoryError: \n")],
)  # fmt: skip
def test_what_ends_a_start_ends_it_with_a_line(happens: str, status: int, said: str) -> None:
    code = f"""
import os, signal, sys
import deploy.__main__
class Finder:
    def find_spec(self, name, *_):
        if name == "deploy.cli":
            {happens}
sys.meta_path.insert(0, Finder())
deploy.__main__.main()
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=SOURCE_ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (status, said)


def test_too_little_address_space_is_said_before_anything_starts() -> None:
    command = ["sh", "-c", 'ulimit -v 400000 && exec "$@"', "sh", sys.executable, "-m", "deploy", "serve"]
    ended = subprocess.run([*command, str(DEMO_MODEL), "--device", "cpu"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert re.fullmatch(r"baton: a process may map 0\.41 GB here \(`ulimit -v`\), a worker needs .*\n", ended.stderr)


@pytest.mark.parametrize(
    ("error", "told"),
    [(MemoryError(), "no memory is left"), (RuntimeError("can't start new thread"), "no thread can be started"),
     (OSError(24, "Too many open files"), "[Errno 24] Too many open files"), (RuntimeError("a bug"), ""),
     (FileNotFoundError(2, "a bug"), "")],
)  # fmt: skip
def test_what_the_system_lacks_is_no_bug(error: Exception, told: str) -> None:
    assert shortage(error).startswith(told) and bool(shortage(error)) == bool(told)
