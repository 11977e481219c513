"""A memory server for workers that nobody gave one: the first that finds none starts it, the last to leave ends it.

It is a process session of its own, so that what ends a worker does not end it, and serves whoever comes. Of two that
are started at once one gets the lock beside the socket, and the other ends (see `listener`).
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
"""Without a worker, unless `memory.linger_s` says how long: a worker that is started again still finds its weights."""
MAX_LOG_BYTES = 1 << 20
SOURCE_ROOT = Path(__file__).resolve().parents[3]


class Starter:
    """Starts the server that is to be found at a socket; call it whenever nobody answers there, until somebody does.

    Args:
        config: of the worker; its [net] and [memory] sections are the server's.
        device: as this process calls it: `cpu` or `cuda:N`.
    """

    def __init__(self, path: Path, config: Config, device: str) -> None:
        linger_s = config.memory.linger_s or LINGER_S
        section = replace(config.memory, socket=str(path), device=device, linger_s=linger_s)
        self.config = replace(config, memory=section, net=_anywhere(config.net))
        self.log = path.with_suffix(".log")
        self.process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> None:
        """Start it, unless that one is still starting; raises ConfigError when it could not."""
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
        threading.Thread(target=self.process.wait, name="memory server", daemon=True).start()  # so that its end is seen
        logger.info(
            "started a memory server for %s, process %d; it logs to %s",
            self.config.memory.device, self.process.pid, self.log,
        )  # fmt: skip


def _anywhere(net: NetSection) -> NetSection:
    """The same for a process with another working directory."""
    secret_file = str(Path(net.secret_file).resolve()) if net.secret_file else ""
    return replace(net, router_endpoint=absolute(net.router_endpoint), secret_file=secret_file)


def _opened(log: Path) -> BinaryIO:
    """Goes on, as another server may write there, too, unless it has become long."""
    is_long = log.exists() and log.stat().st_size > MAX_LOG_BYTES
    return log.open("wb" if is_long else "ab")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "it logged nothing")[:300]
