"""A worker on another host that reads blocks, driven over stdin; run by `test_between_hosts`.

`reader_process.py EXPORT_HEX SECRET_FILE TIMEOUT_S NUM_BLOCKS staged|direct` proves the path, prints GB/s, and obeys,
each with a line:

    pull N         begin to pull blocks 1 to N
    end            wait for the end; after a failure all targets are filled with a canary
    late           bytes that arrived since then
    equal SEED N   whether the blocks pulled last are those of `fill SEED`
    prove          again
    many COUNT SEED    so many pulls of a few random blocks of `fill SEED` into random blocks; after each, whether all
                   targets are right and no other block has changed
"""

import random
import select
import sys
import time
from types import SimpleNamespace
from typing import cast

import torch
import zmq

from common.base.errors import KVError, TransferFailed
from common.device.engine.engine import Engine
from common.kv.pool import KVPool
from common.kv.transport import Pull, make_transport
from common.memory.base import slots
from common.serving.worker.peer_servers import PeerServer, PeerServers
from common.settings.config import Config, NetSection
from common.settings.memory_sections import KVSection
from common.wire.messages.frames import decode
from common.wire.messages.handoff import KVPoolExport
from common.wire.values.pool_shape import PoolShape
from tests.kv.peer_process import BLOCK_BYTES, LAYOUT, random_bytes
from tests.support.allocator import BlockAllocator

CANARY = 0xCD
LOOK_S = 0.002


class Reader:
    """As a worker's loop uses its peers."""

    def __init__(self, export: KVPoolExport, net: NetSection, num_blocks: int, *, is_staged: bool) -> None:
        self.export, shape, device = export, PoolShape(LAYOUT, (num_blocks,)), torch.device("cpu")
        self.num_blocks = num_blocks
        self.pool = KVPool(shape, torch.zeros(shape.num_bytes, dtype=torch.uint8))
        engine = SimpleNamespace(
            pool=self.pool, allocator=BlockAllocator(shape), device=device, transport=make_transport("nixl", device)
        )
        config = Config(net=net, kv=KVSection(min_gb_per_s=0.0, always_stage=is_staged))
        self.peers = PeerServers(cast(Engine, engine), ("reader", time.monotonic_ns()), zmq.Poller(), config)
        self.server: PeerServer | None = None
        self.pulled: Pull | None = None

    def prove(self, _: list[str]) -> str:
        proof = self.peers.prove(self.export)
        while True:
            try:
                next(proof)
            except StopIteration as over:
                self.server, gb_per_s = over.value
                return f"{gb_per_s:.4f} {self.peers.carrier(self.export)}"
            except KVError as error:
                self.turn()
                return f"failed: {error}"
            self.turn()

    def pull(self, words: list[str]) -> str:
        ids = list(range(1, int(words[0]) + 1))
        assert self.server is not None and self.server.pool is not None
        self.pulled = self.server.pool.pull(ids, self.pool, ids)
        return "begun"

    def end(self, _: list[str]) -> str:
        assert self.pulled is not None
        while True:
            self.turn()
            try:
                if self.pulled.done():
                    return "done"
            except TransferFailed as error:
                self.pool.memory.fill_(CANARY)
                return f"failed: {error}"

    def late(self, _: list[str]) -> str:
        self.turn()
        return str(int((self.pool.memory != CANARY).sum()))

    def equal(self, words: list[str]) -> str:
        ids = slice(1, int(words[1]) + 1)
        return str(torch.equal(self.pool.blocks[0][ids], random_bytes(int(words[0]), self.num_blocks)[ids]))

    def many(self, words: list[str]) -> str:
        count, seed = map(int, words)
        rng, blocks = random.Random(seed), self.pool.blocks[0]
        theirs = random_bytes(seed, self.num_blocks)
        expected = torch.full_like(blocks, CANARY)
        blocks.fill_(CANARY)
        for _ in range(count):
            sources, targets = (rng.sample(range(1, self.num_blocks), 8) for _ in range(2))
            assert self.server is not None and self.server.pool is not None
            pull = self.server.pool.pull(sources, self.pool, targets)
            while not pull.done():
                self.turn()
            expected[targets] = theirs[sources]
            if not torch.equal(blocks, expected):
                return f"wrong after {sources} into {targets}"
        return "right"

    def turn(self) -> None:
        time.sleep(LOOK_S)
        self.peers.receive()
        for server in self.peers.check(lambda server: False):
            self.peers.leave(server)


def main(export_hex: str, secret_file: str, timeout_s: float, num_blocks: int, way: str) -> None:
    export = decode(bytes.fromhex(export_hex))
    assert isinstance(export, KVPoolExport)
    net = NetSection(secret_file=secret_file, worker_timeout_s=timeout_s, heartbeat_s=timeout_s / 4)
    slots.NUM_SLOTS, slots.SLOT_BYTES = 4, 20 * BLOCK_BYTES  # a pull goes through each several times
    reader = Reader(export, net, num_blocks, is_staged=way == "staged")
    print(reader.prove([]), flush=True)
    while True:
        while not select.select([sys.stdin], [], [], LOOK_S)[0]:
            reader.turn()
        if not (line := sys.stdin.readline()):
            reader.peers.close()
            return
        command, *words = line.split()
        print(getattr(reader, command)(words), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
