"""Pulls of KV blocks out of a peer's pool, verified and timed; the measuring half of `benchmarks.handoff`.

Block ids are scattered on both sides and new for every pull, so no cache holds the blocks.
"""

import itertools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.handoff_exporter import BLOCKS_AT_ONCE, words_of
from common.base.errors import TransferFailed
from common.base.percentiles import percentile
from common.kv.pool import KVPool
from common.kv.transport import NIXL, PeerPool, Pull, check_compatible, make_transport
from common.memory.client.client import PoolClaim
from common.memory.client.gate_connection import Gate
from common.memory.client.peer_pool_client import PeerPoolClient
from common.wire.messages.handoff import KVPoolExport
from deploy.bench.stats import Figure

OPENING_S = 0.01
"""Between two looks at a pool that opens."""
PULL_DEADLINE_S = 30.0
WARM_UP_PULLS = 3
MAX_COVERS = 64
POISON = 0xAB
EPOCHS = itertools.count(1)
"""A memory server takes each worker's incarnation once."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of pulls of equal length; host times as seen by the caller, `device_s` None without a stream."""

    num_tokens: int
    num_bytes: int
    pull_s: list[float]  # ascending; from the call of pull() until done() is true
    call_s: float  # median time within pull()
    device_s: float | None  # median time on the stream

    def figures(self) -> list[Figure]:
        """Return figures named as in the results; GB are 10^9 bytes, each arriving byte counted once."""
        pull_s = percentile(self.pull_s, 50)
        figures = [
            Figure("pull_p50", pull_s * 1e3, "ms"),
            Figure("pull_p99", percentile(self.pull_s, 99) * 1e3, "ms"),
            Figure("rate", self.num_bytes / pull_s / 1e9, "GB/s"),
            Figure("call", self.call_s * 1e6, "us"),
        ]
        if self.device_s is not None:
            figures.append(Figure("device", self.device_s * 1e3, "ms"))
            figures.append(Figure("device_rate", self.num_bytes / self.device_s / 1e9, "GB/s"))
        return figures


class HandoffBench:
    """A pool here and a peer's pool, with pulls between random blocks.

    Args:
        gate: visits the pool as from another host.
    """

    def __init__(self, export: KVPoolExport, device: torch.device, gate: Gate | None = None) -> None:
        layout, transport = export.layout, make_transport(NIXL if gate else "auto", device)
        self.device = device
        self.client = PeerPoolClient(
            gate or Path(export.memory_socket), ("target", next(EPOCHS)), export.pool_id, layout
        )
        claim = answered(self.client)
        self.pool = KVPool(claim.shape, torch.empty(claim.num_bytes, dtype=torch.uint8, device=device))
        [self.group], [self.blocks] = layout.groups, self.pool.blocks
        check_compatible(export, self.pool, export.transport)
        self.peer: PeerPool = transport.open_peer(claim, export.worker_id, device)
        while not self.peer.is_open(self.pool):
            time.sleep(OPENING_S)
        self.num_covers = 1
        self._generator = torch.Generator().manual_seed(0)

    def close(self) -> None:
        self.peer.close()
        self.client.close()

    def verify(self, num_blocks: int) -> None:
        """Pull once and compare every byte of the target pool; raises TransferFailed naming a wrong block."""
        source_ids, target_ids = self._scattered(num_blocks), self._scattered(num_blocks)
        self.blocks.fill_(POISON)
        self._synchronize()
        wait(self.peer.pull(source_ids, self.pool, target_ids))
        expected = dict(zip(target_ids, source_ids, strict=True))
        for ids in torch.arange(len(self.blocks), device=self.device).split(BLOCKS_AT_ONCE):
            sources = torch.tensor([expected.get(i, -1) for i in ids.tolist()], device=self.device)
            words = words_of(sources, self.group.block_bytes).view(torch.uint8)
            words[sources < 0] = POISON
            wrong = (self.blocks[ids] != words).any(dim=1)  # [len(ids)] bool
            if wrong.any():
                raise TransferFailed(f"block {int(ids[wrong][0])} holds other bytes than it should; the pull is broken")

    def measure(self, num_tokens: int, repeats: int) -> Timing:
        """Time `repeats` pulls in sequence, and then as many on the stream alone."""
        num_blocks = self.group.num_places(num_tokens)
        for _ in range(WARM_UP_PULLS):
            self._timed_pull(num_blocks)
        pulls_s, calls_s = zip(*(self._timed_pull(num_blocks) for _ in range(repeats)), strict=True)
        device_s = statistics.median(self._device_s(num_blocks) for _ in range(repeats)) if self._stream else None
        num_bytes = num_blocks * self.group.block_bytes
        return Timing(num_tokens, num_bytes, sorted(pulls_s), statistics.median(calls_s), device_s)

    @property
    def _stream(self) -> "torch.cuda.Stream | None":
        """The stream of the pulls; None for a transport without a GPU."""
        return getattr(self.peer, "stream", None)

    def _timed_pull(self, num_blocks: int) -> tuple[float, float]:
        """Return the seconds until a pull was done, and the part within pull()."""
        source_ids, target_ids = self._scattered(num_blocks), self._scattered(num_blocks)
        begin_s = time.perf_counter()
        pull = self.peer.pull(source_ids, self.pool, target_ids)
        called_s = time.perf_counter()
        wait(pull)
        return time.perf_counter() - begin_s, called_s - begin_s

    def _device_s(self, num_blocks: int) -> float:
        """Return the seconds of a pull on the stream.

        Larger pulls keep the stream busy until the pull is fully enqueued. Otherwise the events would include the
        host's time for the launch.
        """
        stream = self._stream
        assert stream is not None
        source_ids, target_ids = self._scattered(num_blocks), self._scattered(num_blocks)
        everything = list(range(len(self.blocks)))
        while self.num_covers <= MAX_COVERS:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            cover = [self.peer.pull(everything, self.pool, everything) for _ in range(self.num_covers)][-1]
            begin.record(stream)
            pull = self.peer.pull(source_ids, self.pool, target_ids)
            end.record(stream)
            was_covered = not cover.done()
            wait(pull)
            if was_covered:
                return float(begin.elapsed_time(end)) / 1e3
            self.num_covers *= 2
        raise TransferFailed(f"{MAX_COVERS} pulls of the whole pool end before one of {num_blocks} blocks is enqueued")

    def _scattered(self, num_blocks: int) -> list[int]:
        ids: list[int] = torch.randperm(len(self.blocks), generator=self._generator)[:num_blocks].tolist()
        return ids

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def answered(client: PeerPoolClient) -> PoolClaim:
    """Wait for the client's claim on the visited pool; raises TransferFailed."""
    deadline_s = time.monotonic() + PULL_DEADLINE_S
    while client.claim is None:
        client.poll()
        if client.problem or time.monotonic() > deadline_s:
            raise TransferFailed(client.problem or "the memory server does not answer")
    return client.claim


def wait(pull: Pull) -> None:
    """Poll without a pause, because a decode worker between two steps would poll at once."""
    deadline_s = time.monotonic() + PULL_DEADLINE_S
    while not pull.done():
        if time.monotonic() > deadline_s:
            raise TransferFailed(f"a pull took longer than {PULL_DEADLINE_S:g} s")
