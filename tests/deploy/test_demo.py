"""What a demo leaves behind."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.config import Config
from deploy import demo as module
from deploy.console import Console
from deploy.demo import Verse, demo
from deploy.serve import Fleet

FLEET = Fleet(1, 1, "", 10.0)


@pytest.mark.parametrize("exit_code", [0, 1])
async def test_the_log_is_removed_after_success_and_kept_and_named_after_a_failure(
    exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
        shown = capsys.readouterr().err
        assert len(logs) == 1 and f"all of it: {logs[0]}" in shown and "what happened" in shown
    else:
        assert not logs
