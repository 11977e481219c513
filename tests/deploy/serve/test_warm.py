"""What `baton warm` lacks is named before two minutes of compiling."""

import importlib.util
import sys
from pathlib import Path

import pytest

from deploy.cli import main
from deploy.serve.demo import DEMO_MODEL


@pytest.mark.parametrize(
    ("has_triton", "out", "problem"),
    [
        (False, "kernels", "Triton is not installed here, and baton warm compiles with it; pip install triton in"),
        (True, "no/such/kernels", "no/such is no directory that can be written to"),
    ],
)
def test_a_missing_compiler_or_directory_is_named_at_once(
    has_triton: bool, out: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if has_triton else None)
    monkeypatch.setattr(sys, "argv", ["baton", "warm", str(DEMO_MODEL), "--out", str(tmp_path / out)])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2
    assert problem in capsys.readouterr().err
