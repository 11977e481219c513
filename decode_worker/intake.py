"""Prefill workers and what they hand over: meeting, leases, pulls.

    KVHandoff ──▶ waiting ──room──▶ pulling ──done──▶ scheduler, KVRelease
                     └──abort, lost──▶ KVRelease     (an abort of a pull waits for the copy to end)

Of long prompts a part may have been pulled before (see `ahead`). The running batch never waits for any
of it: pulls run on a stream of their own and are polled. No pull starts on a lease that its prefill
worker has not confirmed recently enough.
"""

import logging
import time
from collections import deque
from dataclasses import dataclass, field

from common.config import DecodeSection
from common.device.engine import Engine
from common.errors import KVError, TransferFailed
from common.kv.proof import prove_path
from common.kv.transport import PeerPool, Pull, check_compatible
from common.wire.messages import (
    KVHandoff,
    KVLease,
    KVPathReport,
    KVPathResult,
    KVPoolExport,
    KVProgress,
    KVRelease,
    pack_ids,
    unpack_ids,
)
from common.wire.sockets import Hub
from decode_worker.ahead import Ahead
from decode_worker.scheduler import Scheduler
from decode_worker.sequence import Key, Sequence

logger = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 6
ABORT_MEMORY_S = 60.0
"""How long an abort is remembered for a handoff that has not arrived yet."""


@dataclass(slots=True)
class Peer:
    """One incarnation of a prefill worker whose pool we can pull from."""

    worker_id: str
    epoch: int
    identity: bytes
    pool: PeerPool
    gb_per_s: float


@dataclass(slots=True)
class Handoff:
    """Blocks that a prefill worker keeps for us."""

    sequence: Sequence
    peer: Peer
    source_ids: list[int]
    lease_s: float
    lease_end_s: float  # by our clock, and not later than by the peer's
    renewed_s: float
    pulls: list[Pull] = field(default_factory=list)
    aborted: bool = False


class Intake:
    """Owns peers and handoffs; sequences that are pulled belong to the scheduler."""

    def __init__(
        self, engine: Engine, scheduler: Scheduler, section: DecodeSection, hub: Hub, worker_id: str, epoch: int
    ) -> None:
        self.engine = engine
        self.scheduler = scheduler
        self.max_pulls = section.max_pulls
        self.hub = hub
        self.worker_id, self.epoch = worker_id, epoch
        self.peers: dict[str, Peer] = {}
        self.ahead = Ahead(scheduler, engine.pool)
        self.waiting: deque[Handoff] = deque()
        self.pulling: list[Handoff] = []
        self.aborted: dict[str, tuple[int, float]] = {}  # request id -> (attempt, when)

    def meet(self, identity: bytes, export: KVPoolExport) -> KVPathReport:
        """Map and prove a prefill worker's pool, answer it, and return what the router should know.

        A worker met before is only answered again: a restarted router has forgotten the answer.
        """
        error, gb_per_s = "", 0.0
        try:
            gb_per_s = self._known_rate(export) or self._prove(identity, export)
        except KVError as problem:
            error = str(problem)
            logger.error("no KV path from %s: %s", export.worker_id, error)
        self.hub.send(identity, KVPathResult(self.worker_id, self.epoch, error))
        return KVPathReport(
            self.worker_id, self.epoch, export.worker_id, export.epoch, export.transport, gb_per_s, error
        )

    def forget(self, worker_id: str, epoch: int) -> list[Sequence]:
        """That incarnation is dead; returns the sequences whose blocks are lost with it."""
        peer = self.peers.get(worker_id)
        if peer is None or peer.epoch != epoch:
            return []
        del self.peers[worker_id]
        lost = [h for h in [*self.waiting, *self.pulling] if h.peer is peer]
        self.waiting = deque(h for h in self.waiting if h.peer is not peer)
        self.pulling = [h for h in self.pulling if h.peer is not peer]
        self.ahead.drop_peer(peer.pool)
        peer.pool.close()  # waits for copies under way
        for handoff in lost:
            if handoff.pulls:
                self.scheduler.unreserve(handoff.sequence)
        return [handoff.sequence for handoff in lost if not handoff.aborted]

    def accept(self, message: KVHandoff) -> str:
        """Queue a handoff; returns why it cannot be taken, or nothing."""
        peer = self.peers.get(message.worker_id)
        if peer is None or peer.epoch != message.epoch:
            return "it comes from a prefill worker that this worker has not met"
        now_s = time.monotonic()
        sequence = Sequence(
            message.request_id, message.attempt, unpack_ids(message.token_ids), message.num_outputs, message.sampling
        )
        handoff = Handoff(sequence, peer, unpack_ids(message.block_ids), message.lease_s, now_s, now_s)
        handoff.lease_end_s = now_s + message.lease_s / 2  # it may have waited in a socket
        if self._was_aborted(sequence.key):
            self._release(handoff)
        else:
            self.waiting.append(handoff)
        return ""

    def progress(self, message: KVProgress) -> None:
        """Pull what is complete of a prompt that goes on; prompts that are complete and wait for room come first."""
        request_id, attempt = key = (message.request_id, message.attempt)
        source_ids, peer = unpack_ids(message.block_ids), self.peers.get(message.worker_id)
        self.ahead.drop(request_id, attempt - 1 if source_ids else attempt)
        if source_ids and peer is not None and peer.epoch == message.epoch and not self._was_aborted(key):
            if not self.waiting:
                self.ahead.begin(key, peer.pool, message.num_tokens)
            self.ahead.pull(key, source_ids)

    def abort(self, request_id: str, attempt: int) -> None:
        """Let go of every attempt up to `attempt`, now or when it arrives."""
        self.aborted[request_id] = (attempt, time.monotonic())
        self.ahead.drop(request_id, attempt)
        for handoff in [h for h in self.waiting if _is_attempt(h.sequence, request_id, attempt)]:
            self.waiting.remove(handoff)
            self._release(handoff)
        for handoff in self.pulling:
            handoff.aborted |= _is_attempt(handoff.sequence, request_id, attempt)

    def start_pulls(self) -> None:
        """Begin pulling the oldest handoffs that there is room for."""
        while self.waiting and len(self.pulling) < self.max_pulls:
            handoff = self.waiting[0]
            if time.monotonic() > handoff.lease_end_s or not self._make_room(handoff):
                return
            self.waiting.popleft()
            self._start_pull(handoff)
            self.pulling.append(handoff)

    def finish_pulls(self) -> list[Sequence]:
        """Sequences whose blocks have arrived; their peers are told to let go."""
        finished = [h for h in self.pulling if all(pull.done() for pull in h.pulls)]
        for handoff in finished:
            self.pulling.remove(handoff)
            self._release(handoff)
            if handoff.aborted:
                self.scheduler.unreserve(handoff.sequence)
        return [handoff.sequence for handoff in finished if not handoff.aborted]

    def make_way(self, but: Key | None = None) -> bool:
        """Give up what was pulled ahead, perhaps but one; whether there was any: blocks come free as copies end."""
        had_any = bool(self.ahead)
        self.ahead.drop_all(but)
        self.ahead.tend()
        return had_any

    def renew(self) -> None:
        """Ask peers to keep what waits, and let go of what is over or old; cheap enough for every turn of the loop."""
        self.ahead.tend()
        now_s = time.monotonic()
        for peer in self.peers.values():
            due = [
                handoff
                for handoff in [*self.waiting, *self.pulling]
                if handoff.peer is peer and now_s - handoff.renewed_s > handoff.lease_s / RENEWALS_PER_LEASE
            ]
            if due:
                for handoff in due:
                    handoff.renewed_s = now_s
                ids = tuple(handoff.sequence.request_id for handoff in due)
                attempts = pack_ids(handoff.sequence.attempt for handoff in due)
                self.hub.send(peer.identity, KVLease(self.worker_id, self.epoch, ids, attempts))
        self.aborted = {k: v for k, v in self.aborted.items() if now_s - v[1] < ABORT_MEMORY_S} if self.aborted else {}

    def renewed(self, message: KVLease) -> None:
        """A peer confirms leases: they last from when we asked."""
        kept = set(zip(message.request_ids, unpack_ids(message.attempts), strict=False))
        for handoff in self.waiting:
            if handoff.sequence.key in kept and handoff.peer.worker_id == message.worker_id:
                handoff.lease_end_s = handoff.renewed_s + handoff.lease_s / 2

    def take_expired(self) -> list[Sequence]:
        """Handoffs whose lease was not confirmed in time; their blocks must be taken for lost."""
        now_s = time.monotonic()
        expired = [h for h in self.waiting if now_s > h.lease_end_s + h.lease_s / 2]
        for handoff in expired:
            self.waiting.remove(handoff)
            self.ahead.drop(*handoff.sequence.key)
            self._release(handoff)
        return [handoff.sequence for handoff in expired]

    def release_all(self) -> list[Sequence]:
        """Give every handoff that is not being pulled back; returns their sequences."""
        self.ahead.drop_all()
        waiting, self.waiting = self.waiting, deque()
        for handoff in waiting:
            self._release(handoff)
        return [handoff.sequence for handoff in waiting]

    def num_handoffs(self) -> int:
        """Those that wait or are being pulled, and those to come that are pulled ahead."""
        return len(self.waiting) + len(self.pulling) + len(self.ahead)

    def close(self) -> None:
        for peer in self.peers.values():
            peer.pool.close()

    def _make_room(self, handoff: Handoff) -> bool:
        """Whether a complete prompt may be admitted, if need be for what others have begun."""
        if not self.scheduler.has_row():
            return False
        sequence = handoff.sequence
        begun = self.ahead.find(sequence.key, handoff.peer.pool, handoff.source_ids)
        num_tokens, num_held = len(sequence.token_ids), len(begun.block_ids) if begun else 0
        if not self.scheduler.has_blocks(num_tokens, num_held):
            self.make_way(but=sequence.key if begun else None)
        return self.scheduler.has_blocks(num_tokens, num_held)

    def _start_pull(self, handoff: Handoff) -> None:
        """Reserve blocks, and pull what was not pulled ahead."""
        sequence, pool, source_ids = handoff.sequence, handoff.peer.pool, handoff.source_ids
        begun, num_pulled = self.ahead.find(sequence.key, pool, source_ids), 0
        if begun is not None:
            self.ahead.take(sequence.key)
            num_pulled, handoff.pulls = len(begun.source_ids), begun.pulls
        self.scheduler.reserve(sequence, begun.block_ids if begun else ())
        rest = slice(num_pulled, len(source_ids))
        handoff.pulls.append(pool.pull(source_ids[rest], self.engine.pool, sequence.block_ids[rest]))

    def _known_rate(self, export: KVPoolExport) -> float:
        """GB/s measured when this incarnation was met, or 0."""
        known = self.peers.get(export.worker_id)
        return known.gb_per_s if known and known.epoch == export.epoch else 0.0

    def _prove(self, identity: bytes, export: KVPoolExport) -> float:
        check_compatible(export, self.engine.pool, self.engine.transport.name)
        pool = self.engine.transport.open_peer(export, self.engine.device)
        try:
            gb_per_s = prove_path(pool, export, self.engine.pool, self.engine.allocator)
        except KVError as error:
            pool.close()
            raise TransferFailed(f"{export.transport} from {export.worker_id}: {error}") from None
        logger.info("KV path from %s: %s, %.1f GB/s", export.worker_id, export.transport, gb_per_s)
        self.peers[export.worker_id] = Peer(export.worker_id, export.epoch, identity, pool, gb_per_s)
        return gb_per_s

    def _was_aborted(self, key: Key) -> bool:
        request_id, attempt = key
        return request_id in self.aborted and attempt <= self.aborted[request_id][0]

    def _release(self, handoff: Handoff) -> None:
        request_id, attempt = handoff.sequence.key
        self.hub.send(handoff.peer.identity, KVRelease(self.worker_id, self.epoch, request_id, attempt))


def _is_attempt(sequence: Sequence, request_id: str, attempt: int) -> bool:
    return sequence.request_id == request_id and sequence.attempt <= attempt
