"""`python -m common.memory`: the owner of one device's memory."""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import closing

from common.base.errors import ConfigError
from common.base.log import StartLog, setup_logging
from common.base.version import VERSION
from common.memory.devices.backing import Backing
from common.memory.devices.cuda_backing import CudaBacking
from common.memory.devices.host_backing import HostBacking
from common.memory.server.announcer import Announcer
from common.memory.server.gate_process import GateProcess
from common.memory.server.listener import SocketInUse
from common.memory.server.server import MemoryServer, Watchdog
from common.settings import options
from common.settings.config import MEMORY_SECTIONS, Config
from common.wire.messages.memory_reports import MemoryReady
from common.wire.messages.worker_id import make_epoch, make_id
from common.wire.transport.endpoints import memory_socket

logger = logging.getLogger(__name__)

DESCRIPTION = """Owns memory of one device for the workers on it: the weights are there once and outlive who uses them,
and so does the pool of KV blocks, in which prompts change hands without a copy.

A worker that finds none for its device starts one, which ends when no worker has been there for a while
(--memory-linger-s). Or start one for each GPU, or one for all workers on a CPU, and name its socket to them
(--worker-memory-socket). It tells the router, if it reaches one at --net-router-endpoint, how full it is, and at once
when a worker died.
It ends with SIGTERM; workers whose memory server is gone finish what they have and leave."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process; return its exit status: 0, or 2 for a wrong setting.

    A server started by a worker (`memory.linger_s` is set) exits with 0 if another server has the socket.
    """
    prog, start = "python -m common.memory", StartLog()
    start.ended("imports")
    try:
        config = options.parse(Config, MEMORY_SECTIONS, prog, DESCRIPTION, sys.argv[1:] if argv is None else argv)
        server_id = make_id("memory", config.memory.id)
        setup_logging(server_id, config.log.level, config.log.format)
        backing = _backing(config.memory.device)
        path = memory_socket(config.memory.socket, backing.device_uuid, config.net.router_endpoint)
        ready = MemoryReady(server_id, make_epoch(), os.getpid(), VERSION, backing.device)
        with closing(Announcer(config.net, ready)) as announcer:
            server = MemoryServer(path, backing, announcer, config.memory)
            start.ended("device and socket")
            server.use_gate(GateProcess(config, path))
            start.report(logger)
            _serve(server)
    except SocketInUse as error:
        if not config.memory.linger_s:
            sys.stderr.write(f"{prog}: {error}\n")
            return 2
        logger.info("not needed: %s", error)
    except ConfigError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 2
    logger.info("stopped")
    return 0


def _backing(device: str) -> Backing:
    """Return the backing of `cpu` or `cuda:N`; raises ConfigError."""
    return HostBacking() if device == "cpu" else CudaBacking(int(device.partition(":")[2]))


def _serve(server: MemoryServer) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    logger.info("owning memory of %s for who connects to %s", server.backing.device, server.path)
    watchdog = Watchdog()
    try:
        server.run(watchdog.alive)
    finally:
        watchdog.stop()
        server.close()


if __name__ == "__main__":
    sys.exit(main())
