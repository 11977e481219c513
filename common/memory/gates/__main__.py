"""`python -m common.memory.gates`: the gate of the memory server at --memory-socket, which starts it."""

import logging
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path

from common.base.errors import ConfigError
from common.base.log import setup_logging
from common.memory.base.nixl_agent import AgentError, bindings
from common.memory.gates.gate import Gate
from common.settings import options
from common.settings.config import MEMORY_SECTIONS, Config
from common.wire.messages.worker_id import make_id

DESCRIPTION = """Lends the pool of KV blocks of a memory server to workers of other hosts, by NIXL. The memory server
starts it, and it ends with the memory server."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run until stdin is closed; return the exit status. Prints the endpoint once bound."""
    prog = "python -m common.memory.gates"
    try:
        config = options.parse(Config, MEMORY_SECTIONS, prog, DESCRIPTION, sys.argv[1:] if argv is None else argv)
        setup_logging(f"{make_id('memory', config.memory.id)}-gate", config.log.level, config.log.format)
        bindings()
        gate = Gate(Path(config.memory.socket), config.memory.gate_endpoint, config.net)
    except (ConfigError, AgentError) as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 2
    sys.stdout.write(f"{gate.hub.endpoint}\n")
    sys.stdout.flush()
    os.set_blocking(sys.stdin.fileno(), False)
    try:
        while not _is_closed(sys.stdin.fileno()):
            gate.turn()
    finally:
        gate.close()
    logging.getLogger(__name__).info("stopped")
    return 0


def _is_closed(descriptor: int) -> bool:
    readable, _, _ = select.select([descriptor], [], [], 0)
    return bool(readable)


if __name__ == "__main__":
    sys.exit(main())
