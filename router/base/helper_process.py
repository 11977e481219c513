"""A helper program of the router: started at first need, and again after an unexpected end."""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence


class HelperProcess:
    """`python -m MODULE`, with messages on stdin and stdout.

    Args:
        first: message sent before all others.
    """

    def __init__(self, module: str, flags: Sequence[str], first: bytes = b"") -> None:
        self._command = [sys.executable, "-m", module, *flags]
        self._first = first
        self.process: Process | None = None  # started last
        self._starting = asyncio.Lock()

    async def running(self) -> Process:
        """Return the running process, started if needed; raises OSError if the start fails."""
        async with self._starting:
            if self.process is None or self.process.returncode is not None:
                self.process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE)
                assert self.process.stdin is not None, "it was made with pipes"
                self.process.stdin.write(self._first)
            return self.process

    async def end(self) -> int | None:
        """Kill the process; return the exit status, None if never started."""
        return None if self.process is None else await stop_process(self.process)


async def stop_process(process: Process) -> int:
    """Kill the process if still running; return the exit status."""
    if process.returncode is None:
        process.kill()
    return await process.wait()
