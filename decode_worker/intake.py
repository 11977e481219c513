"""What prefill workers hand over, until it decodes.

    KVHandoff ──▶ waiting ──room──▶ pulling ──arrived──▶ scheduler, KVRelease
                     └──abort, lost──▶ KVRelease  └──abort, lost──▶ KVRelease     (when no copy is under way)

Of long prompts a part may have been pulled before (see `ahead`). The running batch never waits for any
of it: pulls run on a stream of their own and are polled. No pull starts on a lease that its prefill
worker has not confirmed recently enough. What is lost is given back to the router, which replays it.
"""

import time
from collections import defaultdict, deque
from dataclasses import dataclass, field

from common.config import DecodeSection
from common.device.engine import Engine
from common.errors import ErrorCode
from common.kv.tables import num_handed_over, num_seen, tables_handed_over
from common.serving.vocabulary import stranger
from common.wire.handoff_messages import KVHandoff, KVLease, KVProgress, KVRelease
from common.wire.packing import pack_ids, unpack_array, unpack_ids
from common.wire.pool_shape import shown
from common.wire.sockets import Hub
from common.wire.worker_id import connection_of
from decode_worker.aborts import Aborts
from decode_worker.ahead import Ahead, Begun
from decode_worker.copies import Copies, missing
from decode_worker.lease import Lease
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import DecodeSequence, Key
from decode_worker.sources import Source, Sources

CHORES_INTERVAL_S = 0.1
"""Between two looks at what only time brings about; other looks are many more."""


Failure = tuple[Key, ErrorCode, str]
"""A handoff that will not come, and why."""


@dataclass(slots=True, eq=False)
class Handoff:
    """Blocks that a prefill worker keeps for us."""

    sequence: DecodeSequence
    source: Source
    source_ids: list[list[int]]  # by group
    lease: Lease
    copies: Copies = field(default_factory=Copies)
    aborted: bool = False


class Intake:
    """Owns handoffs; sequences that are pulled belong to the scheduler."""

    def __init__(
        self, engine: Engine, scheduler: DecodeScheduler, section: DecodeSection, hub: Hub, worker_id: str, epoch: int
    ) -> None:
        self.engine = engine
        self.scheduler, self.layout = scheduler, scheduler.layout
        self.max_pulls = section.max_pulls
        self.hub = hub
        self.worker_id, self.epoch = worker_id, epoch
        self.sources = Sources(engine, hub, worker_id, epoch)
        self.ahead = Ahead(scheduler, engine.pool)
        self.aborts = Aborts()
        self.waiting: deque[Handoff] = deque()
        self.pulling: list[Handoff] = []
        self._failures: list[Failure] = []
        self._next_chores_s = 0.0

    # --- what prefill workers and the router say ------------------------------------------------

    def accept(self, message: KVHandoff) -> None:
        """Queue a handoff."""
        key = (message.request_id, message.attempt)
        source = self.sources.find(message.worker_id, message.epoch)
        if source is None:
            # It may have been taken for dead while it stood still, and would keep the blocks for a whole lease.
            self._release(connection_of(message.worker_id, message.epoch), key)
            self._failures.append(
                (
                    key,
                    ErrorCode.HANDOFF_LOST,
                    f"it comes from prefill worker {message.worker_id}, which cannot be pulled from",
                )
            )
            return
        token_ids = unpack_array(message.token_ids)
        sequence = DecodeSequence(*key, token_ids, message.num_outputs, message.sampling)
        lease = Lease.begun(message.lease_s, time.monotonic())
        handoff = Handoff(sequence, source, source.pool.shape.by_group(unpack_ids(message.block_ids)), lease)
        handed_over, num_blocks = tuple(map(len, handoff.source_ids)), num_handed_over(self.layout, len(token_ids) - 1)
        if self.aborts.cover(*key):
            self._release(handoff.source.identity, handoff.sequence.key)
        elif objection := self.scheduler.objection(sequence):
            self._refuse(handoff, ErrorCode.NEVER_FITS, objection)
        elif problem := stranger(token_ids, self.engine.vocab_size):
            self._refuse(handoff, ErrorCode.INTERNAL, problem)
        elif handed_over != num_blocks:
            problem = f"{shown(handed_over)} blocks handed over, its tokens fill {shown(num_blocks)}"
            self._refuse(handoff, ErrorCode.INTERNAL, problem)
        else:
            self.waiting.append(handoff)

    def progress(self, message: KVProgress) -> None:
        """Pull what is complete of a prompt that goes on; prompts that are complete and wait for room come first."""
        request_id, attempt = key = (message.request_id, message.attempt)
        source_ids, source = unpack_ids(message.block_ids), self.sources.find(message.worker_id, message.epoch)
        self.ahead.drop(request_id, attempt - 1 if source_ids else attempt)
        if source_ids and source is not None and not self.aborts.cover(*key):
            complete = source.pool.shape.by_group(source_ids)
            if not self.waiting and all(
                len(ids) * group.block_size <= message.num_tokens
                for group, ids in zip(self.layout.groups, complete, strict=True)
            ):
                self.ahead.begin(key, source.pool, message.num_tokens)
            self.ahead.pull(key, source_ids)

    def confirm(self, message: KVLease) -> None:
        """A source keeps these."""
        kept = set(zip(message.request_ids, unpack_ids(message.attempts), strict=False))
        for handoff in self.waiting:
            if handoff.sequence.key in kept and handoff.source.worker_id == message.worker_id:
                handoff.lease.confirm()

    def abort(self, request_id: str, attempt: int) -> None:
        """Let go of every attempt up to `attempt`, now or when it arrives."""
        self.aborts.note(request_id, attempt)
        self.ahead.drop(request_id, attempt)
        for handoff in [h for h in self.waiting if _is_attempt(h.sequence, request_id, attempt)]:
            self.waiting.remove(handoff)
            self._release(handoff.source.identity, handoff.sequence.key)
        for handoff in self.pulling:
            handoff.aborted |= _is_attempt(handoff.sequence, request_id, attempt)

    def forget(self, worker_id: str, epoch: int) -> None:
        """That incarnation of a prefill worker is dead, and what it kept for us is lost."""
        source = self.sources.forget(worker_id, epoch)  # after this no copy of it is under way
        if source is None:
            return
        self.ahead.drop_source(source.pool)
        pulling = [h for h in self.pulling if h.source is source]
        lost = [*pulling, *(h for h in self.waiting if h.source is source)]
        self.waiting = deque(h for h in self.waiting if h.source is not source)
        self.pulling = [h for h in self.pulling if h.source is not source]
        for handoff in pulling:
            self.scheduler.unreserve(handoff.sequence)
        self._lose(lost, f"prefill worker {worker_id} is gone")

    # --- a turn of the loop ---------------------------------------------------------------------

    def finish_pulls(self) -> list[DecodeSequence]:
        """Sequences whose blocks have arrived; their sources are told to let go."""
        over = [h for h in self.pulling if h.copies.over()]
        for handoff in over:
            self.pulling.remove(handoff)
            self._release(handoff.source.identity, handoff.sequence.key)
            if handoff.aborted or handoff.copies.problem:
                self.scheduler.unreserve(handoff.sequence)
                self._lose([handoff], handoff.copies.problem)
        return [h.sequence for h in over if not h.aborted and not h.copies.problem]

    def start_pulls(self) -> None:
        """Begin pulling the oldest handoffs that there is room for and whose lease is sure."""
        now_s = time.monotonic()
        for handoff in list(self.waiting):
            if not handoff.lease.is_sure(now_s):
                continue
            if len(self.pulling) == self.max_pulls or not self._make_room(handoff):
                return
            self.waiting.remove(handoff)
            self._start_pull(handoff)
            self.pulling.append(handoff)

    def tend(self) -> None:
        """Let go of what is over; now and then, see to leases, and to aborts that are too old to matter."""
        self.ahead.tend()
        now_s = time.monotonic()
        if now_s >= self._next_chores_s:
            self._next_chores_s = now_s + CHORES_INTERVAL_S
            self._renew_leases(now_s)
            self._expire_leases(now_s)
            self.aborts.forget_old()

    def take_failures(self) -> list[Failure]:
        """Handoffs that will not come."""
        failures, self._failures = self._failures, []
        return failures

    def make_way(self, but: Key | None = None) -> bool:
        """Give up what was pulled ahead, perhaps but one; whether there was any: blocks come free as copies end."""
        had_any = bool(self.ahead)
        self.ahead.drop_all(but)
        self.ahead.tend()
        return had_any

    def release_all(self) -> list[DecodeSequence]:
        """Give every handoff that is not being pulled back; returns their sequences."""
        self.ahead.drop_all()
        waiting, self.waiting = self.waiting, deque()
        for handoff in waiting:
            self._release(handoff.source.identity, handoff.sequence.key)
        return [handoff.sequence for handoff in waiting]

    def has(self, key: Key) -> bool:
        """Whether a handoff waits; one that is being pulled is the scheduler's."""
        return any(handoff.sequence.key == key for handoff in self.waiting)

    def is_copying(self) -> bool:
        """Whether a copy may be over soon."""
        return bool(self.pulling or self.sources.meetings)

    def num_handoffs(self) -> int:
        """Those that wait or are being pulled, and those to come that are pulled ahead."""
        return len(self.waiting) + len(self.pulling) + len(self.ahead)

    # --- inside ---------------------------------------------------------------------------------

    def _make_room(self, handoff: Handoff) -> bool:
        """Whether a complete prompt may be admitted, if need be for what others have begun."""
        if not self.scheduler.has_row():
            return False
        sequence = handoff.sequence
        begun, num_tokens = self._begun(handoff), len(sequence.token_ids)
        lacking = self.layout.nothing if begun else num_seen(self.layout, num_tokens)
        if not self.scheduler.has_blocks(lacking):
            self.make_way(but=sequence.key if begun else None)
        return self.scheduler.has_blocks(lacking)

    def _start_pull(self, handoff: Handoff) -> None:
        """Reserve blocks, and pull what was not pulled ahead."""
        sequence, nothing = handoff.sequence, [list[int]() for _ in handoff.source_ids]
        tables, pulled = tables_handed_over(self.layout, len(sequence.token_ids) - 1, nothing), nothing
        begun = self._begun(handoff)
        if begun is not None:
            self.ahead.take(sequence.key)
            tables, pulled, handoff.copies = begun.tables, begun.source_ids, begun.copies
        self.scheduler.reserve(sequence, tables)
        rest = missing(sequence.tables, handoff.source_ids, pulled)
        handoff.copies.start(handoff.source.pool, rest.source_ids, self.engine.pool, rest.target_ids)

    def _begun(self, handoff: Handoff) -> Begun | None:
        """What was pulled ahead of it."""
        num_tokens = len(handoff.sequence.token_ids) - 1
        return self.ahead.find(handoff.sequence.key, handoff.source.pool, num_tokens, handoff.source_ids)

    def _renew_leases(self, now_s: float) -> None:
        """Ask sources to keep what waits and what is being pulled."""
        due: defaultdict[bytes, list[Key]] = defaultdict(list)
        for handoff in [*self.waiting, *self.pulling]:
            if handoff.lease.is_due(now_s):
                handoff.lease.asked_s = now_s
                due[handoff.source.identity].append(handoff.sequence.key)
        for identity, keys in due.items():
            request_ids, attempts = zip(*keys, strict=True)
            self.hub.send(identity, KVLease(self.worker_id, self.epoch, request_ids, pack_ids(attempts)))

    def _expire_leases(self, now_s: float) -> None:
        """Take for lost what waits on a lease that was not confirmed in time."""
        expired = [h for h in self.waiting if h.lease.is_over(now_s)]
        for handoff in expired:
            self.waiting.remove(handoff)
            self.ahead.drop(*handoff.sequence.key)
            self._release(handoff.source.identity, handoff.sequence.key)
        self._lose(expired, "its lease was not confirmed in time")

    def _lose(self, handoffs: list[Handoff], reason: str) -> None:
        """Tell the router, but for those that nobody waits for."""
        lost = [handoff.sequence.key for handoff in handoffs if not handoff.aborted]
        self._failures += [(key, ErrorCode.HANDOFF_LOST, reason) for key in lost]

    def _refuse(self, handoff: Handoff, code: ErrorCode, reason: str) -> None:
        """Let go of what will never be pulled, whatever comes free: nobody else shall wait behind it."""
        self.ahead.drop(*handoff.sequence.key)
        self._release(handoff.source.identity, handoff.sequence.key)
        self._failures.append((handoff.sequence.key, code, reason))

    def _release(self, identity: bytes, key: Key) -> None:
        self.hub.send(identity, KVRelease(self.worker_id, self.epoch, *key))


def _is_attempt(sequence: DecodeSequence, request_id: str, attempt: int) -> bool:
    return sequence.request_id == request_id and sequence.attempt <= attempt
