"""What a demo leaves behind."""

import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.settings.config import Config
from deploy.processes.console import Console
from deploy.processes.launch_plan import SOURCE_ROOT
from deploy.serve import demo as module
from deploy.serve.command import Fleet
from deploy.serve.demo import Verse, demo

FLEET = Fleet(1, 1, "", 10.0)


@pytest.mark.parametrize("exit_code", [0, 1])
async def test_the_log_is_removed_after_success_and_kept_and_named_after_a_failure(
    exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    @asynccontextmanager
    async def prepared(config: Config, fleet: Fleet, console: Console) -> AsyncIterator[tuple[None, None]]:
        console.say("what happened")
        yield None, None

    async def serve_one(*_: object) -> int:
        return exit_code

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module, "prepared", prepared)
    monkeypatch.setattr(module, "_serve_one", serve_one)
    assert await demo(Config(), FLEET, Verse("", 1, 1)) == exit_code
    logs = list(tmp_path.iterdir())
    if exit_code:
        shown = capfd.readouterr().err
        assert len(logs) == 1 and f"all of it: {logs[0]}" in shown and "what happened" in shown
    else:
        assert not logs


@pytest.mark.medium
def test_the_first_thing_one_sees_is_what_readme_shows() -> None:
    """Changes of the sampler change the verse: another seed may end it after three tokens."""
    shown = (SOURCE_ROOT / "README.md").read_text().partition("On two CPU cores:\n")[2].partition("[...]")[0]
    command = [sys.executable, "-m", "deploy.cli", "demo", "--device", "cpu"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=SOURCE_ROOT, check=False)
    assert ended.returncode == 0, ended.stderr
    verse = [line.strip() for line in shown.strip().splitlines()]
    assert "\n".join(verse) in ended.stdout
    assert "   160 tokens\n" in ended.stdout
