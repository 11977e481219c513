"""A memory server for workers without a configured server: the first worker starts a server, which ends when unused.

The server is a process session of its own, so signals to a worker do not end the server. It serves any worker. If two
are started at once, the holder of the lock beside the socket stays, and the other ends (see `listener`).
"""

import logging
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from common.base.errors import ConfigError
from common.settings import options
from common.settings.config import MEMORY_SECTIONS, Config, NetSection
from common.wire.transport.endpoints import absolute

logger = logging.getLogger(__name__)

LINGER_S = 60.0
"""Life without a worker unless `memory.linger_s` is set; a restarted worker still finds its weights."""
MAX_LOG_BYTES = 1 << 20
SOURCE_ROOT = Path(__file__).resolve().parents[3]


class Starter:
    """Starter of a server at a socket; call again and again until a server answers.

    Args:
        config: the worker's; the server gets its [net] and [memory] sections.
        device: this process's name of the device: `cpu` or `cuda:N`.
    """

    def __init__(self, path: Path, config: Config, device: str) -> None:
        linger_s = config.memory.linger_s or LINGER_S
        section = replace(config.memory, socket=str(path), device=device, linger_s=linger_s)
        self.config = replace(config, memory=section, net=_anywhere(config.net))
        self.log = path.with_suffix(".log")
        self.process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> None:
        """Start the server unless one is starting; raises ConfigError if the server failed to start."""
        if self.process is not None and self.process.poll():
            raise ConfigError(
                f"the memory server of {self.config.memory.device} ended with status {self.process.returncode}: "
                f"{_last_line(self.log)} (more in {self.log})"
            )
        if self.process is None or self.process.poll() is not None:
            self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "common.memory", *options.to_flags(self.config, MEMORY_SECTIONS)]
        try:
            with _opened(self.log) as log:
                self.process = subprocess.Popen(
                    command,
                    cwd=SOURCE_ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            raise ConfigError(f"no memory server can be started: {error}; see worker.memory_socket") from None
        threading.Thread(target=self.process.wait, name="memory server", daemon=True).start()  # to reap the process
        logger.info(
            "started a memory server for %s, process %d; it logs to %s",
            self.config.memory.device, self.process.pid, self.log,
        )  # fmt: skip


def _anywhere(net: NetSection) -> NetSection:
    """Make paths absolute, for a process with another working directory."""
    secret_file = str(Path(net.secret_file).resolve()) if net.secret_file else ""
    return replace(net, router_endpoint=absolute(net.router_endpoint), secret_file=secret_file)


def _opened(log: Path) -> BinaryIO:
    """Open the log to append, because another server may write there; truncate a long log."""
    is_long = log.exists() and log.stat().st_size > MAX_LOG_BYTES
    return log.open("wb" if is_long else "ab")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "it logged nothing")[:300]
