"""`python -m common.memory`: the owner of one device's memory."""

import logging
import signal
import sys
from collections.abc import Sequence

from common import options
from common.config import MEMORY_SECTIONS, Config
from common.errors import ConfigError
from common.log import setup_logging
from common.memory.backing import make_backing
from common.memory.server import MemoryServer
from common.wire.endpoints import memory_socket

logger = logging.getLogger(__name__)

DESCRIPTION = """Owns memory of one device for the workers on it: the weights are there once, and outlive who uses them.

Start one for each GPU, or one for all workers on a CPU, and name its socket to them (--worker-memory-socket).
It ends with SIGTERM; workers whose memory server is gone finish what they have and leave."""


def main(argv: Sequence[str] | None = None) -> int:
    """The process; returns its exit status: 0, or 2 for a setting that is wrong."""
    prog = "python -m common.memory"
    try:
        config = options.parse(Config, MEMORY_SECTIONS, prog, DESCRIPTION, sys.argv[1:] if argv is None else argv)
        if not config.memory.socket:
            raise ConfigError("memory.socket is empty: name the path at which workers find this process, or auto")
        setup_logging("memory", config.log.level)
        device = config.memory.device
        path = memory_socket(config.memory.socket, device)
        server = MemoryServer(path, make_backing(device))
    except ConfigError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    logger.info("owning memory of %s for who connects to %s", device, path)
    try:
        server.run()
    finally:
        server.close()
    logger.info("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
