"""A program of the router's own beside it: started when it is first needed, and again when it has ended."""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence


class HelperProcess:
    """`python -m MODULE`, spoken to through its stdin and stdout.

    Args:
        first: what it is told before all else.
    """

    def __init__(self, module: str, flags: Sequence[str], first: bytes = b"") -> None:
        self._command = [sys.executable, "-m", module, *flags]
        self._first = first
        self.process: Process | None = None  # the last one
        self._starting = asyncio.Lock()

    async def running(self) -> Process:
        """One that runs, the same until it ends; raises OSError when none can be started."""
        async with self._starting:
            if self.process is None or self.process.returncode is not None:
                self.process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE)
                assert self.process.stdin is not None, "it was made with pipes"
                self.process.stdin.write(self._first)
            return self.process

    async def end(self) -> int | None:
        """End it, if there ever was one; its exit status."""
        return None if self.process is None else await ended(self.process)


async def ended(process: Process) -> int:
    """The exit status of a process, which is killed if it runs."""
    if process.returncode is None:
        process.kill()
    return await process.wait()
