"""The gate of this memory server, as its parent sees it: started first, and started again at the same port."""

import logging
import select
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from common.settings import options
from common.settings.config import MEMORY_SECTIONS, Config
from common.wire.transport.endpoints import AUTO, told, unbound

logger = logging.getLogger(__name__)

START_S = 30.0
"""Longest wait for a gate's endpoint, before workers are served."""
PAUSE_S = 1.0
END_S = 5.0
SOURCE_ROOT = Path(__file__).resolve().parents[3]


class GateProcess:
    """A gate, or none if `memory.gate_endpoint` is auto without `net.advertise`.

    The memory server serves without its gate if the gate cannot start. `endpoint` is "" then.
    """

    def __init__(self, config: Config, path: Path) -> None:
        wanted, self.endpoint = config.memory.gate_endpoint, ""
        self._process: subprocess.Popen[bytes] | None = None
        self._next_s = 0.0
        if wanted == AUTO and not config.net.advertise:
            return
        bound = unbound(config.net.advertise) if wanted == AUTO else wanted
        self._config = replace(
            config,
            memory=replace(config.memory, socket=str(path.absolute()), gate_endpoint=bound),
            net=replace(config.net, secret_file=_absolute(config.net.secret_file)),
        )
        self._start()
        if bound := self._bound():
            self._config = replace(self._config, memory=replace(self._config.memory, gate_endpoint=bound))
            self.endpoint = told(bound, config.net.advertise)
            logger.info("workers of other hosts reach KV blocks at %s", self.endpoint)
        else:
            logger.error("workers of other hosts reach no KV blocks here, because the gate did not start")
            self.close()

    def update(self) -> None:
        """Start an ended gate again, after a pause; visits of the former gate are lost."""
        if self._process is None or self._process.poll() is None:
            return
        now_s = time.monotonic()
        if not self._next_s:
            logger.error("the gate ended with status %d; its visits are lost", self._process.returncode)
            self._next_s = now_s + PAUSE_S
        elif now_s > self._next_s:
            self._next_s = 0.0
            self._start()

    def close(self) -> None:
        """End the gate, which ends its visits."""
        if self._process is None:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _start(self) -> None:
        command = [sys.executable, "-m", "common.memory.gates", *options.to_flags(self._config, MEMORY_SECTIONS)]
        self._process = subprocess.Popen(
            command,
            cwd=SOURCE_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # signals to the memory server do not end it
        )

    def _bound(self) -> str:
        """Return the endpoint that the gate prints; "" if there is none in time."""
        assert self._process is not None and self._process.stdout is not None, "it was just started"
        readable, _, _ = select.select([self._process.stdout], [], [], START_S)
        return self._process.stdout.readline().decode().strip() if readable else ""


def _absolute(path: str) -> str:
    return str(Path(path).resolve()) if path else ""
