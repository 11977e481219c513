"""Prompts handed over in another pool: accepted there once there is room here, then pulled and freed there.

    KVOffer ──▶ waiting ──a row and blocks, accept──▶ pulling ──arrived, free──▶ the scheduler's
                   └──abort, refusal, standstill──▶ declined    └──abort, copy broken, visit lost──▶ free or lost.

Blocks cached in the own pool are not pulled (see `prefixes`), and a part of a long prompt may be pulled ahead (see
`ahead`). The running batch never waits for pulls, because pulls use a stream of their own and are polled. A pull counts
only if the connection to the source's memory server stands when the pull is over. Lost handoffs go back to the router,
which replays the requests.
"""

import time
from collections import deque
from collections.abc import Sequence
from functools import reduce
from itertools import islice

from common.base.errors import ErrorCode
from common.device.engine.engine import Engine
from common.kv.copies import missing
from common.kv.tables import num_handed_over, tables_handed_over
from common.serving.prompts.standstill import Standstill
from common.serving.worker.peer_servers import Visit
from common.settings.config import Config
from common.wire.messages.handoff import KVProgress
from common.wire.messages.memory import KVOffer
from common.wire.transport.router_link import Load
from common.wire.values.kv_layout import Counts
from common.wire.values.packing import unpack_ids
from common.wire.values.pool_shape import plus
from common.wire.values.step_counts import PullMeter
from decode_worker.arrivals.ahead import SILENCE_S, Ahead, Begun
from decode_worker.arrivals.announced import Announced
from decode_worker.arrivals.offers import Failure, flaw
from decode_worker.arrivals.prefixes import Prefixes
from decode_worker.arrivals.pulled_prompt import Handoff
from decode_worker.arrivals.sources import Sources
from decode_worker.sequences.row_queue import RowQueue
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sequence import DecodeSequence, Key, is_attempt

MAX_HINTS = 64
REMEMBERED = 8
"""Handoffs remembered; the largest sets the blocks kept at hand for the next."""


class Pulls:
    """Owner of handoffs until they have arrived; the scheduler owns sequences being pulled."""

    def __init__(
        self, engine: Engine, scheduler: DecodeScheduler, config: Config, sources: Sources, announced: Announced
    ) -> None:
        self.engine, self.scheduler, self.sources, self.announced = engine, scheduler, sources, announced
        self.prefixes = Prefixes(engine.shared, min_tokens=config.kv.prefix_min_tokens)
        self.standstill = Standstill()
        self.layout = scheduler.layout
        self.max_pulls = config.decode.max_pulls
        self.ahead = Ahead(scheduler, engine.pool)
        self.waiting: RowQueue[Handoff] = RowQueue(scheduler.capacity.num_rows_of.__getitem__)
        self.pulling: list[Handoff] = []
        self.hints: dict[Key, tuple[KVProgress, float]] = {}  # latest progress without room yet, with its time
        self.latest: deque[Counts] = deque(maxlen=REMEMBERED)  # blocks of the latest handoffs
        self.meter = PullMeter()
        self._failures: list[Failure] = []

    def __len__(self) -> int:
        """Return the number of handoffs that wait or are pulled, and of prompts pulled ahead."""
        return len(self.waiting) + len(self.pulling) + len(self.ahead)

    # --- messages of prefill workers, memory servers and the router ------------------------------

    def add(self, visit: Visit, sequence: DecodeSequence, offer: KVOffer) -> None:
        """Queue an offer, or decline an offer whose blocks cannot be pulled or cannot hold the prompt."""
        if visit.pool is None:  # the path was lost and is not proven again
            self._decline(visit, offer)
            self._failures.append((sequence.key, ErrorCode.HANDOFF_LOST, "its pool is not mapped here"))
            return
        offered = visit.pool.shape.by_group(unpack_ids(offer.block_ids))
        if problem := flaw(offered, sequence, self.layout):
            self._decline(visit, offer)
            self._failures.append((sequence.key, ErrorCode.INTERNAL, problem))
        else:
            self.hints.pop(sequence.key, None)
            num_filled = num_handed_over(self.layout, len(sequence.token_ids) - 1)
            source_ids = [ids[:count] for ids, count in zip(offered, num_filled, strict=True)]
            handoff = Handoff(sequence, visit, offer, source_ids)
            self.waiting.add(handoff)
            self.prefixes.begin(handoff, was_begun=self._begun(handoff) is not None)
            if handoff.is_looked_up:
                self._ask_for_next()
            else:
                self.latest.append(self.prefixes.lacking(handoff))

    def progress(self, message: KVProgress) -> None:
        """Pull the complete blocks of an announced prompt once there is room; complete prompts come first."""
        request_id, attempt = key = (message.request_id, message.attempt)
        source_ids, source = unpack_ids(message.block_ids), self.sources.find(message.worker_id, message.epoch)
        self._drop_ahead(request_id, attempt - 1 if source_ids else attempt)
        pool = source.visit.pool if source is not None and source.visit is not None else None
        if not source_ids or pool is None or key not in self.announced:
            return
        if not self.waiting and self._may_be_of(message.num_tokens, pool.shape.by_group(source_ids)):
            self.ahead.begin(key, pool, message.num_tokens)
        if key in self.ahead.begun:
            self.ahead.pull(key, source_ids, unpack_ids(message.generations))
        elif len(self.hints) < MAX_HINTS:
            self.hints[key] = message, time.monotonic()

    def abort(self, request_id: str, attempt: int) -> None:
        """Give up every attempt up to `attempt`."""
        self._drop_ahead(request_id, attempt)
        for handoff in self.waiting.find(request_id, attempt):
            self.waiting.remove(handoff)
            self.prefixes.forget(handoff)
            self._decline(handoff.visit, handoff.offer)
        for handoff in self.pulling:
            handoff.aborted |= is_attempt(handoff.sequence.key, request_id, attempt)

    def forget(self, worker_id: str, epoch: int) -> None:
        """Forget a dead prefill worker: give up prompts pulled ahead; offers of complete prompts stay."""
        source = self.sources.forget(worker_id, epoch)
        if source is not None and source.visit is not None and source.visit.pool is not None:
            self.ahead.drop_source(source.visit.pool)

    # --- a turn of the loop ---------------------------------------------------------------------

    def finish(self) -> list[DecodeSequence]:
        """Return sequences whose blocks have arrived; free the source blocks."""
        over = [handoff for handoff in self.pulling if handoff.copies.over()]
        for visit in {handoff.visit for handoff in over}:
            visit.guest.look()
        arrived = []
        for handoff in over:
            self.pulling.remove(handoff)
            problem = handoff.copies.problem or handoff.visit.problem
            handoff.visit.guest.free(handoff.offer)
            self.meter.note(handoff.copies.num_pulls, handoff.copies.num_bytes, handoff.copies.seconds)
            if not handoff.aborted and not problem:
                self.prefixes.arrived(handoff)
                arrived.append(handoff.sequence)
                continue
            self.scheduler.unreserve(handoff.sequence)
            self._lose([handoff], problem)
        return arrived

    def start_next(self) -> DecodeSequence | None:
        """Accept the next handoff and begin to pull, if there is a row and room."""
        handoff = self._next()
        if handoff is None or not self.prepare_next():
            return None
        self.waiting.remove(handoff)
        handoff.visit.guest.accept(handoff.offer)
        handoff.sequence.claimed_s = time.monotonic()
        self._start(handoff)
        self.pulling.append(handoff)
        return handoff.sequence

    def prepare_next(self) -> bool:
        """Ask for blocks of the next handoff, and give up blocks pulled ahead if too few are free.

        Tell whether a row and blocks are free. Without a free row blocks are asked for, too, so that a handoff needs
        nothing else when a row comes free.
        """
        handoff = self._next()
        if handoff is None or self.has_blocks_for_next():
            return handoff is not None and self.scheduler.capacity.has_row()
        waits_in_vain = self.engine.shared.magazine.is_short or not self.prefixes.awaits_blocks(handoff)
        if self.scheduler.capacity.has_row() and waits_in_vain:
            self._give_up_ahead(but=handoff.sequence.key if self._begun(handoff) else None)
        return self.scheduler.capacity.has_row() and self.has_blocks_for_next()

    def has_blocks_for_next(self) -> bool:
        """Tell whether the next handoff lacks only a row."""
        handoff = self._next()
        if handoff is None or self.prefixes.awaits_blocks(handoff):
            return False
        return self.scheduler.capacity.has_blocks(
            self.layout.nothing if self._begun(handoff) else self.prefixes.lacking(handoff)
        )

    def tend(self) -> None:
        """Give up handoffs of lost memory servers, stale prompts pulled ahead, and handoffs at a standstill."""
        self.ahead.tend()
        if self.waiting:
            self._ask_for_next()
        self._end_standstill()
        if self.hints and not self.waiting:
            self._follow_hint()
        for visit in self.sources.visits.tend(self._uses):
            lost = [handoff for handoff in self.waiting if handoff.visit is visit]
            for handoff in lost:
                self.waiting.remove(handoff)
                self.prefixes.forget(handoff)
            self._lose(lost, visit.problem)
            if visit.pool is not None:
                self.ahead.drop_source(visit.pool)
            self.sources.lose(visit)

    def foreseen(self) -> Counts:
        """Return blocks for the next waiting handoffs and for another like the largest of the latest.

        So no pull waits for blocks.
        """
        next_ones = islice(self.waiting, self.max_pulls)
        waiting = (self.prefixes.lacking(handoff) for handoff in next_ones if not handoff.is_looked_up)
        return reduce(plus, waiting, max(self.latest, key=sum, default=self.layout.nothing))

    def take_failures(self) -> list[Failure]:
        """Take the failed handoffs."""
        failures, self._failures = self._failures, []
        return failures

    def tell(self, load: Load) -> None:
        """Report waiting handoffs, and blocks pulled and found."""
        load.num_waiting = len(self.waiting)
        load.num_pulled_blocks, load.num_found_blocks = self.prefixes.num_pulled, self.prefixes.num_found
        load.pulls = self.meter

    def make_way(self) -> bool:
        """Give up blocks pulled ahead or granted; tell whether there were any.

        Blocks come free as copies end.
        """
        had_any = self.prefixes.let_go(self.waiting) or bool(self.ahead)
        self._give_up_ahead()
        return had_any

    def decline_all(self) -> list[DecodeSequence]:
        """Decline every waiting handoff; return the sequences."""
        self.ahead.drop_all()
        self.hints.clear()
        waiting = self.waiting.clear()
        for handoff in waiting:
            self.prefixes.forget(handoff)
            self._decline(handoff.visit, handoff.offer)
        return [handoff.sequence for handoff in waiting]

    def is_copying(self) -> bool:
        """Tell whether a copy may be over soon."""
        return bool(self.pulling or self.sources.meetings)

    # --- inside ---------------------------------------------------------------------------------

    def _end_standstill(self) -> None:
        """Decline the first handoff if no room will come, because its own pool may wait for blocks held here."""
        is_idle = not self.pulling and not self.scheduler.capacity.num_taken
        is_still = bool(self.waiting) and is_idle
        if self.standstill.is_over(is_still=is_still, num_done=self.engine.shared.num_done) and (
            (handoff := self.waiting.first()) is not None
        ):
            self.waiting.remove(handoff)
            self.prefixes.forget(handoff)
            self._decline(handoff.visit, handoff.offer)
            reason = "no KV blocks come free for it, and nobody gets on in the pool"
            self._failures.append((handoff.sequence.key, ErrorCode.STANDSTILL, reason))

    def _may_be_of(self, num_tokens: int, complete: Sequence[Sequence[int]]) -> bool:
        """Tell whether a prompt of `num_tokens` can have so many complete blocks, by group."""
        pairs = zip(self.layout.groups, complete, strict=True)
        return all(len(ids) * group.block_size <= num_tokens for group, ids in pairs)

    def _follow_hint(self) -> None:
        """Begin with the oldest hint if there is room by now; complete prompts come first."""
        key, (message, heard_s) = next(iter(self.hints.items()))
        if has_room := self.scheduler.capacity.has_room(message.num_tokens + 1):
            self.progress(message)
        if has_room or time.monotonic() - heard_s > SILENCE_S:
            del self.hints[key]

    def _drop_ahead(self, request_id: str, attempt: int) -> None:
        """Give up every attempt up to `attempt`, whether begun or only hinted at."""
        self.ahead.drop(request_id, attempt)
        for key in [key for key in self.hints if is_attempt(key, request_id, attempt)]:
            del self.hints[key]

    def _uses(self, visit: Visit) -> bool:
        return any(handoff.visit is visit for handoff in [*self.waiting, *self.pulling])

    def _next(self) -> Handoff | None:
        """Return the next handoff if a pull may begin, and ask for blocks.

        A handoff with a grant passes a handoff without, because the missing grant may need the granted blocks.
        """
        handoff = self.waiting.first()
        if handoff is None or handoff.visit.problem or len(self.pulling) >= self.max_pulls:
            return None
        self.prefixes.ask(handoff)
        if self.prefixes.awaits_blocks(handoff) and self.prefixes.granted:
            return min(self.prefixes.granted.values(), key=lambda each: self.waiting.rank(each.sequence))
        return handoff

    def _ask_for_next(self) -> None:
        """Ask for blocks of the handoffs to be pulled next, and of no others, because granted blocks lie idle."""
        num_more = self.max_pulls - len(self.prefixes.granted) - len(self.prefixes.asked)
        for handoff in self.waiting.next(self.max_pulls) if num_more > 0 else ():
            self.prefixes.ask(handoff)

    def _give_up_ahead(self, but: Key | None = None) -> None:
        """Give up every prompt pulled ahead except `but`."""
        self.ahead.drop_all(but)
        self.ahead.tend()

    def _begun(self, handoff: Handoff) -> Begun | None:
        """Return the part of a handoff pulled ahead, if any."""
        if handoff.visit.pool is None:
            return None
        sequence, pool = handoff.sequence, handoff.visit.pool
        num_tokens = len(sequence.token_ids) - 1
        return self.ahead.find(sequence.key, pool, num_tokens, handoff.source_ids, handoff.generations)

    def _start(self, handoff: Handoff) -> None:
        """Reserve blocks, and pull blocks neither found nor pulled ahead."""
        sequence, begun = handoff.sequence, self._begun(handoff)
        grant = self.prefixes.take(handoff)
        here: Sequence[Sequence[int]] = [[] for _ in handoff.source_ids]
        blocks = here if grant is None else [[*grant.found, *grant.fresh]]
        tables = tables_handed_over(self.layout, len(sequence.token_ids) - 1, blocks)
        if grant is not None:
            here = [grant.found]
        if begun is not None:
            self.ahead.take(sequence.key)
            tables, here, handoff.copies = begun.tables, begun.source_ids, begun.copies
        self._drop_ahead(*sequence.key)  # an entry that does not match the offer
        self.scheduler.reserve(sequence, tables)
        rest = missing(sequence.tables, handoff.source_ids, here)
        assert handoff.visit.pool is not None, "what waits was offered in a pool that is mapped"
        if rest.source_ids:
            handoff.copies.start(handoff.visit.pool, rest.source_ids, self.engine.pool, rest.target_ids)

    def _decline(self, visit: Visit, offer: KVOffer) -> None:
        self._drop_ahead(offer.request_id, offer.attempt)
        visit.guest.decline(offer)

    def _lose(self, handoffs: list[Handoff], reason: str) -> None:
        """Report lost handoffs to the router, except aborted handoffs."""
        lost = [handoff.sequence.key for handoff in handoffs if not handoff.aborted]
        self._failures += [(key, ErrorCode.HANDOFF_LOST, reason) for key in lost]
