"""A worker of another process: leases blocks, hangs up when told to, and lives on until it is killed."""

import os
import sys
import time
from pathlib import Path

from common.memory.client.client import MemoryClient
from common.wire.messages.memory import BlocksWanted, MemoryKnock
from tests.support.messages import LAYOUT


def main(path: Path, num_blocks: int, num_leased: int) -> None:
    client = MemoryClient(path, "decode-0", 1, is_decoding=True)
    client.claim_pool(LAYOUT, (num_blocks,))
    client.send(BlocksWanted((num_leased,)))
    client.send(MemoryKnock())  # as its loop does; answered after all else
    while not client.receive(MemoryKnock):
        time.sleep(0.005)
    print("leased by", os.getpid(), flush=True)
    sys.stdin.readline()
    client.close()
    print("closed", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
