"""Pools of another host, read by NIXL: an agent for each visit, a few reads for each pull.

Host memory is read as it is, a GPU's through staging. A read cannot be recalled, and its bytes arrive even after its
handle is released or its peer removed. Only the end of the agent ends the read. So the first error or missed deadline
ends the agent, on a thread. Until then no pull under way is over, so target blocks stay their owner's.
"""

import threading
import time
from collections.abc import Callable, Sequence

import torch

from common.base.errors import TransferFailed
from common.kv.nixl_direct import DirectReads
from common.kv.nixl_staged import StagedReads
from common.kv.pool import KVPool
from common.kv.transport import check_size, pairs_by_group
from common.memory.base.nixl_agent import Agent, AgentError, bindings
from common.memory.client.client import PoolClaim
from common.memory.client.peer_pool_client import LentClaim
from common.wire.messages.worker_id import make_epoch

GRACE_S, SLOWNESS = 2.0, 8
"""A pull may last `GRACE_S`, and `SLOWNESS` times as long as at the measured rate."""
OPEN_S = 10.0
"""Longest wait for an agent. The first of a process takes half a second, and two or more beside a GPU."""
FIRST_BYTES_PER_S = 12.5e6
"""Assumed rate before the first measurement: 100 Mbit/s."""
MEASURED_BYTES = 1 << 20
"""Shorter pulls tell latency rather than the rate."""

Groups = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Source and target blocks of each group, counted within the group."""


class NixlPeerPool:
    """A pool lent by another host; a thread opens it."""

    proof_bytes = 16 << 20

    def __init__(self, claim: LentClaim, worker_id: str) -> None:
        self.claim, self.shape, self.worker_id = claim, claim.shape, worker_id
        if claim.slots is not None:
            self.proof_bytes = claim.slots.num_bytes
        self.problem = ""
        self.bytes_per_s, self.num_pending_bytes = 0.0, 0  # of pulls under way
        self.reads: DirectReads | StagedReads | None = None  # set once open
        self.is_over = threading.Event()
        self._agent: Agent | None = None
        self._target: KVPool | None = None
        self._opening: threading.Thread | None = None
        self._open_by_s = 0.0
        self._is_closing = False

    def is_open(self, target: KVPool) -> bool:
        """See `PeerPool`; the target is registered once, so all pulls have the same."""
        if self._opening is None:
            self._target, self._open_by_s = target, time.monotonic() + OPEN_S
            self._opening = threading.Thread(target=self._open, args=(target,), name="nixl")
            self._opening.start()
        is_late = time.monotonic() > self._open_by_s
        if self.reads is not None and not self.problem:
            return True
        if self.problem or is_late:
            self.fail(f"NIXL is not ready after {OPEN_S:.0f} s")
            raise TransferFailed(self.problem)
        return False

    def pull(self, source_ids: list[int], target: KVPool, target_ids: list[int]) -> "NixlPull":
        """Begin to read."""
        groups = pairs_by_group(self.shape, source_ids, target.shape, target_ids)
        if self.problem:
            raise TransferFailed(self.problem)
        assert self.reads is not None and self._target is target, "the pool is open for this target"
        sizes = [group.block_bytes for group in self.shape.layout.groups]
        num_bytes = sum(size * len(ids) for size, (ids, _) in zip(sizes, groups, strict=True))
        return NixlPull(self, groups, num_bytes)

    def measured(self, num_bytes: int, seconds: float) -> None:
        """Take the rate of a finished pull, unless the pull was short."""
        if num_bytes >= MEASURED_BYTES:
            rate = num_bytes / max(seconds, 1e-6)
            self.bytes_per_s = (self.bytes_per_s + rate) / 2 if self.bytes_per_s else rate

    def fail(self, problem: str) -> None:
        """Give the visit up, and end the agent."""
        self.problem = self.problem or f"pool of worker {self.worker_id}: {problem}"
        self.claim.witness.lose(self.problem)
        self.close()

    def close(self) -> None:
        """Begin to end the agent; `is_over` is set when no byte can arrive any more."""
        self.problem = self.problem or f"pool of worker {self.worker_id}: closed"
        if not self._is_closing:
            self._is_closing = True
            threading.Thread(target=self._end, name="nixl end").start()

    def _open(self, target: KVPool) -> None:
        try:
            self._agent = Agent(f"reader-{make_epoch():x}", self.claim.ucx_transports)
            reads = DirectReads if self.claim.slots is None else StagedReads
            self.reads = reads(self._agent, self.claim, target)
        except AgentError as error:
            self.problem = f"pool of worker {self.worker_id}: {error}"

    def _end(self) -> None:
        if self._opening is not None:
            self._opening.join()
        if self.reads is not None:
            self.reads.close()
        if self._agent is not None:
            self._agent.destroy()
        if self.reads is not None:
            self.reads.free()
        self.is_over.set()


class NixlPull:
    """Reads of a pull, and the proof that the blocks were claimed until the last one ended."""

    def __init__(self, pool: NixlPeerPool, groups: Groups, num_bytes: int) -> None:
        self.pool, self.groups, self.num_bytes = pool, groups, num_bytes
        self.are_read: Callable[[], bool] | None = None  # once begun
        self.question: int | None = None  # asked after the last read
        self.begun_s = self.seconds = 0.0
        self._is_done = not num_bytes
        pool.num_pending_bytes += num_bytes
        allowed_s = GRACE_S + SLOWNESS * pool.num_pending_bytes / (pool.bytes_per_s or FIRST_BYTES_PER_S)
        self.deadline_s = time.monotonic() + allowed_s
        self.allowed_s = allowed_s

    def done(self) -> bool:
        """See `Pull`; raises TransferFailed once no byte can arrive any more."""
        if self._is_done:
            return True
        pool = self.pool
        if pool.is_over.is_set():
            raise TransferFailed(pool.problem)
        if pool.problem or not self._has_arrived():
            return False
        self._is_done = True
        pool.num_pending_bytes -= self.num_bytes
        pool.measured(self.num_bytes, self.seconds)
        return True

    def duration_s(self) -> float:
        return self.seconds

    def _has_arrived(self) -> bool:
        try:
            if self._is_read() and self._was_claimed():
                return True
        except AgentError as error:
            self.pool.fail(str(error))
            return False
        if time.monotonic() > self.deadline_s:
            self.pool.fail(f"{self.num_bytes} bytes did not arrive within {self.allowed_s:.1f} s")
        return False

    def _is_read(self) -> bool:
        """Begin due reads; tell whether all have ended."""
        assert self.pool.reads is not None, "the pool is open"
        if self.are_read is None:
            self.begun_s = time.perf_counter()
            self.are_read = self.pool.reads.begin(self.groups)
        return self.are_read()

    def _was_claimed(self) -> bool:
        """Tell whether the memory server has confirmed the claims after the last read."""
        if self.question is None:
            self.seconds = time.perf_counter() - self.begun_s
            self.question = self.pool.claim.witness.ask()
        return self.pool.claim.witness.has_answered(self.question)


def open_peer(claim: PoolClaim, worker_id: str, device: torch.device) -> NixlPeerPool:
    """Open a peer's pool (see `Transport`)."""
    if not isinstance(claim, LentClaim):
        raise TransferFailed(f"the pool of worker {worker_id} is not lent to other hosts")
    if claim.slots is None:
        check_size(claim, worker_id, claim.num_lent_bytes)
    elif claim.num_lent_bytes < (num_bytes := claim.slots.num_bytes):
        raise TransferFailed(f"worker {worker_id}: staging of {claim.num_lent_bytes} bytes, not {num_bytes}")
    try:
        bindings()
    except AgentError as error:
        raise TransferFailed(str(error)) from None
    return NixlPeerPool(claim, worker_id)
