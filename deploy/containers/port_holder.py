"""Hold a port for routers that come and go: bind the port, accept nothing, and hand it out at a unix socket.

    python -P -m deploy.containers.port_holder ADDRESS:PORT PATH

A router serves the port with --router-take-over PATH. Without a router, connections wait in the kernel's queue. So a
router may be restarted or replaced, and no client is refused.
"""

import asyncio
import logging
import signal
import socket
import sys
from pathlib import Path

from common.base.log import setup_logging
from common.wire.transport.port_sharing import PortOffer

logger = logging.getLogger(__name__)

BACKLOG = 4096
"""Connections waiting for a router, limited by net.core.somaxconn of the kernel."""


async def hold(address: str, port: int, path: Path) -> None:
    """Hold the port until SIGTERM or SIGINT."""
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    with socket.create_server((address, port), backlog=BACKLOG) as listener:
        offer = PortOffer(path, [listener])
        offer.start()
        logger.info("holding port %d, handed out at %s", port, path)
        await over.wait()
        await offer.close()


def main(argv: list[str]) -> int:
    """Hold the port of the command line; return the exit status: 0, 1 for a port or path in use, 2 for wrong usage."""
    if len(argv) != 2 or not argv[0].rpartition(":")[2].isdecimal():
        print("usage: python -P -m deploy.containers.port_holder ADDRESS:PORT PATH", file=sys.stderr)
        return 2
    setup_logging("port")
    address, _, port = argv[0].rpartition(":")
    try:
        asyncio.run(hold(address, int(port), Path(argv[1])))
    except OSError as error:
        print(f"cannot hold {argv[0]} for {argv[1]}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
