import re
import subprocess
import sys

import pytest

from common.config import Config
from common.options import from_flags
from deploy.autoscale.judge import Pace
from deploy.autoscale.options import AutoscaleOptions, autoscale_of
from deploy.cli import build_parser, main
from deploy.demo import DEMO_MODEL
from deploy.fleet_options import fleet_of
from deploy.launch_plan import SOURCE_ROOT


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
        ("--autoscale --kv-transport none --decode 4", r"--autoscale and kv\.transport = none"),
        ("--decode 2 --autoscale-step-ms 20", r"--autoscale-step-ms does nothing without --autoscale"),
        ("--decode 2 --autoscale --autoscale-window-s 0.5", r"0\.5: 1 to 3600"),
        ("--decode 2 --autoscale --autoscale-cooldown-s -1", r"-1: 0 to 86400"),
        ("--memory-device cuda:1", r"memory\.linger_s are for one memory server"),
        ("--worker-id mine", r"worker\.id and worker\.memory_socket are for one worker, and chosen here"),
        ("--gpu 0", r"baton serve: error: unrecognized arguments: --gpu 0; did you mean --gpus\?"),
        ("--kv-blocksize=32 --zzz", r"--kv-blocksize=32 --zzz; did you mean --kv-block-size\?"),
        ("--zzz", r"unrecognized arguments: --zzz; --help lists what there is"),
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


@pytest.mark.parametrize(("argv", "num_prefill"), [("", 1), ("--prefill 3", 3), ("--kv-transport none", 0)])
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
