"""`python -m common.memory.gates.lender FD NAME TRANSPORTS`: lends the memory in file FD to a single peer by NIXL.

Each visit has a process, because its end surely ends the peer's reads. UCX may also abort the process when a peer ends
amid a read. The memory, a pool or staging, is mapped read-only, so no peer can write.

Prints address, size and metadata (see `PoolLent`): 8 bytes each, little-endian, and the rest; all as hex. Ends when
stdin is closed.
"""

import mmap
import os
import sys

import numpy as np

from common.memory.base.nixl_agent import Agent, AgentError

NUMBER_BYTES = 8


def main(descriptor: int, name: str, transports: str) -> int:
    """Lend until stdin is closed; return the exit status."""
    mapped = np.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size, access=mmap.ACCESS_READ), np.uint8)
    address = int(mapped.ctypes.data)
    try:
        agent = Agent(name, transports)
        agent.register(address, mapped.nbytes)
        metadata = agent.metadata()
    except AgentError as error:
        _tell(f"!{error}")
        return 1
    numbers = [number.to_bytes(NUMBER_BYTES, "little") for number in (address, mapped.nbytes)]
    _tell(b"".join([*numbers, metadata]).hex())
    sys.stdin.buffer.read()
    os._exit(0)  # the peer's reads end with the process; an orderly end of UCX could hang


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
