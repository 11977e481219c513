"""One supervised process: start, forward its output, end it; and when to start it again."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from deploy.console import Console
from deploy.launch_plan import SOURCE_ROOT, ProcessSpec

EXEC_CHILD = Path(__file__).with_name("exec_child.py")
MAX_LINE_BYTES = 1 << 20
LAST_OUTPUT_DEADLINE_S = 1.0


class Backoff:
    """Delays between restarts: none, then 0.5 s doubling to 30 s; from the start again after 30 s of life."""

    def __init__(self, first_s: float = 0.5, longest_s: float = 30.0, forgiven_after_s: float = 30.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._forgiven_after_s = forgiven_after_s
        self.num_crashes = 0

    def after(self, lived_s: float) -> float:
        """Seconds to wait before the next start of a process that lived for `lived_s`."""
        if lived_s >= self._forgiven_after_s:
            self.num_crashes = 0
        self.num_crashes += 1
        if self.num_crashes == 1:
            return 0.0
        return min(self._first_s * 2.0 ** min(self.num_crashes - 2, 30), self._longest_s)


class Child:
    """A running process in a session of its own, so that Ctrl-C reaches the supervisor alone."""

    def __init__(self, spec: ProcessSpec, process: asyncio.subprocess.Process, console: Console) -> None:
        self.spec = spec
        self.pid = process.pid
        self._process = process
        self._started_s = time.monotonic()
        self._output = asyncio.create_task(self._forward(console))

    @classmethod
    async def start(
        cls, spec: ProcessSpec, environ: Mapping[str, str], console: Console, *, has_input: bool = False
    ) -> "Child":
        launcher = [sys.executable, "-I", "-S", str(EXEC_CHILD), str(os.getpid())]
        process = await asyncio.create_subprocess_exec(
            *launcher,
            *spec.argv,
            stdin=asyncio.subprocess.PIPE if has_input else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**child_environment(environ), **spec.env},
            start_new_session=True,
            limit=MAX_LINE_BYTES,
        )
        return cls(spec, process, console)

    async def become(self, spec: ProcessSpec, order: bytes) -> bool:
        """Have it go on as another, by what it reads; false if it has ended."""
        assert self._process.stdin is not None, "it was started with an input"
        self.spec, self._started_s = spec, time.monotonic()
        try:
            self._process.stdin.write(order)
            await self._process.stdin.drain()
        except ConnectionError:
            return False
        self._process.stdin.close()
        return self._process.returncode is None

    @property
    def lived_s(self) -> float:
        return time.monotonic() - self._started_s

    async def ended(self) -> int:
        """Wait for the end; the exit code, negative for a signal. Takes whatever it left running along."""
        code = await self._process.wait()
        self.signal(signal.SIGKILL)
        await asyncio.wait([self._output], timeout=LAST_OUTPUT_DEADLINE_S)
        self._output.cancel()
        return code

    def signal(self, number: signal.Signals) -> None:
        """Send to the main process; SIGKILL goes to its whole group."""
        try:
            if number == signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                self._process.send_signal(number)
        except ProcessLookupError:
            pass  # already gone, which is what a signal is for

    async def _forward(self, console: Console) -> None:
        """Its lines to the console, until it has ended."""
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # longer than MAX_LINE_BYTES: the reader dropped it
                name = self.spec.name
                console.child_line(name, f"[{name}] a line longer than {MAX_LINE_BYTES} bytes was dropped")
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            if text:
                console.child_line(self.spec.name, text)


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The supervisor's environment, with our source findable and GPUs numbered as nvidia-smi does."""
    paths = [str(SOURCE_ROOT), environ.get("PYTHONPATH", "")]
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        **environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
    }


def describe_exit(code: int) -> str:
    """`exit code 1` or `signal SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
