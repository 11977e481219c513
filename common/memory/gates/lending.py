"""A lender process of a visit, as its gate sees it."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from common.memory.gates.lender import NUMBER_BYTES

SOURCE_ROOT = Path(__file__).resolve().parents[3]


class Lent(NamedTuple):
    """A lender's word to its peer (see `PoolLent`)."""

    address: int
    num_bytes: int
    metadata: bytes


class LendingFailed(Exception):
    """A lender that could not begin, or has ended."""


class Lending:
    """A lender; readable when `told` has something to say.

    Args:
        descriptor: of the file to lend; stays the caller's.
        name: of the agent, unique.
    """

    def __init__(self, descriptor: int, name: str, transports: str) -> None:
        command = [sys.executable, "-m", "common.memory.gates.lender", str(descriptor), name, transports]
        self.process = subprocess.Popen(
            command, cwd=SOURCE_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[descriptor]
        )

    def told(self) -> Lent:
        """Return what the lender has told; call when readable. Raises LendingFailed at its end."""
        assert self.process.stdout is not None, "it is a pipe"
        line = self.process.stdout.readline().decode().strip()  # written at once
        if line.startswith("!"):
            raise LendingFailed(line[1:].strip())
        if not line:
            raise LendingFailed(f"the process that lends it ended with status {self.process.wait()}")
        data = bytes.fromhex(line)
        address, num_bytes = data[:NUMBER_BYTES], data[NUMBER_BYTES : 2 * NUMBER_BYTES]
        return Lent(int.from_bytes(address, "little"), int.from_bytes(num_bytes, "little"), data[2 * NUMBER_BYTES :])

    def fileno(self) -> int:
        assert self.process.stdout is not None, "it is a pipe"
        return self.process.stdout.fileno()

    def close(self) -> None:
        """End the lender; the peer reads nothing more once this returns."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
