import subprocess
import sys

import pytest

from common.config import Config
from common.options import from_flags
from deploy.cli import build_parser, main
from deploy.launch_plan import SOURCE_ROOT


def test_serve_takes_short_flags_and_every_option() -> None:
    argv = "serve some/dir --host 0.0.0.0 --port 9000 --device cpu --prefill 2 --kv-block-size 32 --log-level DEBUG"
    args = build_parser().parse_args(argv.split())
    config = from_flags(Config, args)
    assert (config.model.path, config.router.host, config.router.port) == ("some/dir", "0.0.0.0", 9000)
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


def test_the_supervisor_never_imports_torch() -> None:
    code = "import deploy.cli, sys; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=SOURCE_ROOT, timeout=60).returncode == 0
