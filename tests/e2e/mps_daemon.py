"""Programs that share a GPU through an MPS daemon of their own."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from deploy.processes.mps import GUARD, LOG_DIRECTORY, PIPE_DIRECTORY, PROBE
from tests.e2e.programs import Launch, Program, executed
from tests.e2e.system import TIMEOUT_S


@contextmanager
def mps(directory: Path) -> Iterator[Launch]:
    """Programs under a daemon of their own, but for memory servers, as `baton serve` starts them."""
    directories = {PIPE_DIRECTORY: str(directory / "pipe"), LOG_DIRECTORY: str(directory / "log")}
    for each in directories.values():
        Path(each).mkdir(mode=0o700)
    command = [sys.executable, str(GUARD), sys.executable, str(PROBE), "0"]
    guard = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | directories, start_new_session=True
    )
    try:
        assert guard.stdin is not None and guard.stdout is not None
        assert guard.stdout.readline().strip() == b"ready"

        def launch(module: str, flags: Sequence[str], output: BinaryIO) -> Program:
            with pytest.MonkeyPatch.context() as patch:
                for name, value in directories.items() if module != "common.memory" else ():
                    patch.setenv(name, value)
                return executed(module, flags, output)

        yield launch
    finally:
        guard.communicate(timeout=TIMEOUT_S)
