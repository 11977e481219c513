"""A supervised process: start, forwarding of output, end, and delays between restarts."""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from io import FileIO

from deploy.processes.console import Console
from deploy.processes.exec_child import child_environment, launcher
from deploy.processes.launch_plan import ProcessSpec

MAX_LINE_BYTES = 1 << 20
LAST_DEADLINE_S = 1.0
BURY_INTERVAL_S = 0.01


class Backoff:
    """Delays between restarts: none, then 0.5 s doubling to 30 s; starts anew after 30 s of life."""

    def __init__(self, first_s: float = 0.5, longest_s: float = 30.0, forgiven_after_s: float = 30.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._forgiven_after_s = forgiven_after_s
        self.num_crashes = 0

    def after(self, lived_s: float) -> float:
        """Return the seconds to wait before the next start of a process that lived for `lived_s`."""
        if lived_s >= self._forgiven_after_s:
            self.num_crashes = 0
        self.num_crashes += 1
        if self.num_crashes == 1:
            return 0.0
        return min(self._first_s * 2.0 ** min(self.num_crashes - 2, 30), self._longest_s)


class Adopted:
    """A child that asyncio has not started, with the part of its interface that `Child` uses."""

    def __init__(self, pid: int) -> None:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises ChildProcessError if not adopted
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._code: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(self._pidfd, self._reap)

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    def send_signal(self, number: signal.Signals) -> None:
        if not self._code.done():
            os.kill(self.pid, number)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        _, status = os.waitpid(self.pid, 0)
        self._code.set_result(os.waitstatus_to_exitcode(status))


class Child:
    """A running process in a session of its own, so that Ctrl-C reaches the supervisor alone."""

    def __init__(
        self, spec: ProcessSpec, process: asyncio.subprocess.Process | Adopted, output: FileIO, console: Console
    ) -> None:
        self.spec = spec
        self.pid = process.pid
        self.last_line = ""  # of the output
        self._process = process
        self._started_s = time.monotonic()
        self._output = asyncio.create_task(self._forward(output, console))

    @classmethod
    async def start(cls, spec: ProcessSpec, environ: Mapping[str, str], console: Console) -> "Child":
        """Start a process without input."""
        output, from_output = make_pipe()  # asyncio's own pipe would wait for all writers to end
        with from_output:
            try:
                process = await asyncio.create_subprocess_exec(
                    *launcher(spec.argv),
                    stdin=subprocess.DEVNULL,
                    stdout=from_output,
                    stderr=subprocess.STDOUT,
                    env={**child_environment(environ), **spec.env},
                    start_new_session=True,
                )
            except BaseException:
                output.close()
                raise
        return cls(spec, process, output, console)

    @property
    def lived_s(self) -> float:
        return time.monotonic() - self._started_s

    async def ended(self) -> int:
        """Wait for the end and kill remaining descendants; return the exit code, negative for a signal."""
        code = await self._process.wait()
        self.signal(signal.SIGKILL)
        last = [self._output, asyncio.create_task(self._bury())]
        await asyncio.wait(last, timeout=LAST_DEADLINE_S)
        for task in last:
            task.cancel()
        return code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the main process; SIGKILL goes to the whole group."""
        with contextlib.suppress(ProcessLookupError):  # already gone
            self._process.send_signal(number)
        if number == signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    async def _bury(self) -> None:
        """Reap processes of the group that became children of the supervisor."""
        with contextlib.suppress(ChildProcessError):  # none is left
            while True:
                if os.waitid(os.P_PGID, self.pid, os.WEXITED | os.WNOHANG) is None:
                    await asyncio.sleep(BURY_INTERVAL_S)

    async def _forward(self, output: FileIO, console: Console) -> None:
        """Forward output lines to the console until the end of the output."""
        reader = asyncio.StreamReader(MAX_LINE_BYTES)
        loop = asyncio.get_running_loop()
        pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), output)
        with contextlib.closing(pipe):
            await self._forward_lines(reader, console)

    async def _forward_lines(self, reader: asyncio.StreamReader, console: Console) -> None:
        while True:
            try:
                line = await reader.readline()
            except ValueError:  # longer than MAX_LINE_BYTES, dropped by the reader
                name = self.spec.name
                console.child_line(name, f"[{name}] a line longer than {MAX_LINE_BYTES} bytes was dropped")
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            if text:
                self.last_line = text
                console.child_line(self.spec.name, text)


def make_pipe() -> tuple[FileIO, FileIO]:
    """Return the read end and the write end of a pipe."""
    read, write = os.pipe()
    return FileIO(read, "rb"), FileIO(write, "wb")


def describe_exit(code: int) -> str:
    """Return `exit code 1` or `signal SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
