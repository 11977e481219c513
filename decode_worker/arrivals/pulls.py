"""Prompts handed over in another pool: accepted there once there is room here, then pulled and freed there.

    KVOffer ──▶ waiting ──a row and blocks, accept──▶ pulling ──arrived, free──▶ the scheduler's
                   └──abort, refusal, standstill──▶ declined    └──abort, copy broken, visit lost──▶ free or lost.

Blocks cached in the own pool are not pulled (see `prefixes`), and a part of a long prompt may be pulled ahead (see
`ahead`). The running batch never waits for pulls, because pulls use a stream of their own and are polled. A pull counts
only if the connection to the source's memory server stands when the pull is over. Lost handoffs go back to the router,
which replays the requests.
"""

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
from common.wire.messages.memory import KVOffer
from common.wire.transport.router_link import Load
from common.wire.values.kv_layout import Counts
from common.wire.values.packing import unpack_ids
from common.wire.values.pool_shape import plus
from common.wire.values.step_counts import PullMeter
from decode_worker.arrivals.announced import Announced
from decode_worker.arrivals.early import EarlyPulls
from decode_worker.arrivals.offers import Failure, flaw
from decode_worker.arrivals.prefixes import Prefixes
from decode_worker.arrivals.pulled_prompt import Handoff
from decode_worker.arrivals.sources import Sources
from decode_worker.sequences.row_queue import RowQueue
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sequence import DecodeSequence, is_attempt

REMEMBERED = 8
"""Handoffs remembered; the largest sets the blocks kept at hand for the next."""


class Pulls:
    """Owner of handoffs until they have arrived; the scheduler owns sequences being pulled."""

    def __init__(
        self, engine: Engine, scheduler: DecodeScheduler, config: Config, sources: Sources, announced: Announced
    ) -> None:
        self.engine, self.scheduler, self.sources = engine, scheduler, sources
        self.prefixes = Prefixes(engine.shared, min_tokens=config.kv.prefix_min_tokens)
        self.standstill = Standstill()
        self.layout = scheduler.layout
        self.max_pulls = config.decode.max_pulls
        self.waiting: RowQueue[Handoff] = RowQueue(scheduler.capacity.num_rows_of.__getitem__)
        self.early = EarlyPulls(scheduler, engine.pool, sources, announced, self.waiting)
        self.pulling: list[Handoff] = []
        self.latest: deque[Counts] = deque(maxlen=REMEMBERED)  # blocks of the latest handoffs
        self.meter = PullMeter()
        self._failures: list[Failure] = []

    def __len__(self) -> int:
        """Return the number of handoffs that wait or are pulled, and of prompts pulled ahead."""
        return len(self.waiting) + len(self.pulling) + len(self.early.ahead)

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
            self.early.hints.pop(sequence.key, None)
            num_filled = num_handed_over(self.layout, len(sequence.token_ids) - 1)
            source_ids = [ids[:count] for ids, count in zip(offered, num_filled, strict=True)]
            handoff = Handoff(sequence, visit, offer, source_ids)
            self.waiting.add(handoff)
            self.prefixes.begin(handoff, was_begun=self.early.find(handoff) is not None)
            if handoff.is_looked_up:
                self._ask_for_next()
            else:
                self.latest.append(self.prefixes.lacking(handoff))

    def abort(self, request_id: str, attempt: int) -> None:
        """Give up every attempt up to `attempt`."""
        self.early.drop(request_id, attempt)
        for handoff in self.waiting.find(request_id, attempt):
            self._refuse(handoff)
        for handoff in self.pulling:
            handoff.aborted |= is_attempt(handoff.sequence.key, request_id, attempt)

    def finish(self) -> list[DecodeSequence]:
        """Return sequences whose blocks have arrived; free the source blocks."""
        over = [handoff for handoff in self.pulling if handoff.copies.over()]
        for visit in {handoff.visit for handoff in over}:
            visit.peer.poll()
        arrived = []
        for handoff in over:
            self.pulling.remove(handoff)
            problem = handoff.copies.problem or handoff.visit.problem
            handoff.visit.peer.free(handoff.offer)
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
        handoff.visit.peer.accept(handoff.offer)
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
        waits_in_vain = self.engine.shared.leases.demand.is_short or not self.prefixes.awaits_blocks(handoff)
        if self.scheduler.capacity.has_row() and waits_in_vain:
            self.early.drop_begun(but=handoff.sequence.key if self.early.find(handoff) else None)
        return self.scheduler.capacity.has_row() and self.has_blocks_for_next()

    def has_blocks_for_next(self) -> bool:
        """Tell whether the next handoff lacks only a row."""
        handoff = self._next()
        if handoff is None or self.prefixes.awaits_blocks(handoff):
            return False
        return self.scheduler.capacity.has_blocks(
            self.layout.nothing if self.early.find(handoff) else self.prefixes.lacking(handoff)
        )

    def tend(self) -> None:
        """Give up handoffs of lost memory servers, stale prompts pulled ahead, and handoffs at a standstill."""
        self.early.ahead.tend()
        if self.waiting:
            self._ask_for_next()
        self._end_standstill()
        self.early.follow_hint()
        for visit in self.sources.visits.tend(self._uses):
            lost = [handoff for handoff in self.waiting if handoff.visit is visit]
            for handoff in lost:
                self.waiting.remove(handoff)
                self.prefixes.forget(handoff)
            self._lose(lost, visit.problem)
            if visit.pool is not None:
                self.early.ahead.drop_source(visit.pool)
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

    def report(self, load: Load) -> None:
        """Report waiting handoffs, and blocks pulled and found."""
        load.num_waiting = len(self.waiting)
        load.num_pulled_blocks, load.num_found_blocks = self.prefixes.num_pulled, self.prefixes.num_found
        load.pulls = self.meter

    def make_way(self) -> bool:
        """Give up blocks pulled ahead or granted; tell whether there were any.

        Blocks come free as copies end.
        """
        had_any = self.prefixes.let_go(self.waiting) or bool(self.early.ahead)
        self.early.drop_begun()
        return had_any

    def drop_all(self) -> None:
        """Decline every waiting handoff, and abort every pull."""
        self.early.ahead.drop_all()
        self.early.hints.clear()
        for handoff in list(self.waiting):
            self._refuse(handoff)
        for handoff in self.pulling:
            handoff.aborted = True

    def is_copying(self) -> bool:
        """Tell whether a copy may be over soon."""
        return bool(self.pulling or self.sources.meetings)

    def _end_standstill(self) -> None:
        """Decline the first handoff if no room will come, because its own pool may wait for blocks held here."""
        is_idle = not self.pulling and not self.scheduler.capacity.num_taken
        is_still = bool(self.waiting) and is_idle
        if self.standstill.is_over(is_still=is_still, num_done=self.engine.shared.num_done) and (
            (handoff := self.waiting.first()) is not None
        ):
            self._refuse(handoff)
            reason = "no KV blocks come free for it, and nobody gets on in the pool"
            self._failures.append((handoff.sequence.key, ErrorCode.STANDSTILL, reason))

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

    def _start(self, handoff: Handoff) -> None:
        """Reserve blocks, and pull blocks neither found nor pulled ahead."""
        sequence, begun = handoff.sequence, self.early.find(handoff)
        grant = self.prefixes.take(handoff)
        here: Sequence[Sequence[int]] = [[] for _ in handoff.source_ids]
        blocks = here if grant is None else [[*grant.found, *grant.fresh]]
        tables = tables_handed_over(self.layout, len(sequence.token_ids) - 1, blocks)
        if grant is not None:
            here = [grant.found]
        if begun is not None:
            self.early.ahead.take(sequence.key)
            tables, here, handoff.copies = begun.tables, begun.source_ids, begun.copies
        self.early.drop(*sequence.key)  # an entry that does not match the offer
        self.scheduler.reserve(sequence, tables)
        rest = missing(sequence.tables, handoff.source_ids, here)
        assert handoff.visit.pool is not None, "what waits was offered in a pool that is mapped"
        if rest.source_ids:
            handoff.copies.start(handoff.visit.pool, rest.source_ids, self.engine.pool, rest.target_ids)

    def _refuse(self, handoff: Handoff) -> None:
        """Decline a waiting handoff."""
        self.waiting.remove(handoff)
        self.prefixes.forget(handoff)
        self._decline(handoff.visit, handoff.offer)

    def _decline(self, visit: Visit, offer: KVOffer) -> None:
        self.early.drop(offer.request_id, offer.attempt)
        visit.peer.decline(offer)

    def _lose(self, handoffs: list[Handoff], reason: str) -> None:
        """Report lost handoffs to the router, except aborted handoffs."""
        lost = [handoff.sequence.key for handoff in handoffs if not handoff.aborted]
        self._failures += [(key, ErrorCode.HANDOFF_LOST, reason) for key in lost]
