"""Prompts handed over in another pool: accepted there once there is room here, then pulled and freed there.

    KVOffer ──▶ waiting ──a row and blocks, accept──▶ pulled ──arrived, free──▶ the scheduler's
                   └──abort, refusal, standstill──▶ declined └──abort, copy broken, server lost──▶ free or lost.

Blocks cached in the own pool are not pulled (see `prefixes`), and a part of a long prompt may be pulled ahead (see
`ahead`). `transfers` owns the pulls under way.
"""

from common.base.errors import ErrorCode
from common.device.engine.engine import Engine
from common.kv.tables import num_handed_over
from common.serving.prompts.requests import Fail
from common.serving.prompts.standstill import Standstill
from common.serving.worker.peer_servers import PeerServer
from common.settings.config import Config
from common.wire.messages.memory import KVOffer
from common.wire.values.packing import unpack_ids
from decode_worker.arrivals.announced import Announced
from decode_worker.arrivals.early import EarlyPulls
from decode_worker.arrivals.offers import flaw
from decode_worker.arrivals.prefixes import Prefixes
from decode_worker.arrivals.pulled_prompt import Handoff
from decode_worker.arrivals.sources import Sources
from decode_worker.arrivals.transfers import Transfers
from decode_worker.sequences.row_queue import RowQueue
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sequence import DecodeSequence


class Pulls:
    """Queue of handoffs until there is room for their pulls."""

    def __init__(
        self,
        engine: Engine,
        scheduler: DecodeScheduler,
        config: Config,
        sources: Sources,
        announced: Announced,
        fail: Fail,
    ) -> None:
        self.engine, self.scheduler, self.sources, self.fail = engine, scheduler, sources, fail
        self.prefixes = Prefixes(
            engine.shared,
            min_tokens=config.kv.prefix_min_tokens,
            reserve=lambda: scheduler.capacity.num_growing,
        )
        self.standstill = Standstill()
        self.max_pulls = config.decode.max_pulls
        self.waiting: RowQueue[Handoff] = RowQueue(scheduler.capacity.num_rows_of.__getitem__)
        self.early = EarlyPulls(scheduler, engine.pool, sources, announced, self.waiting)
        self.transfers = Transfers(engine.pool, scheduler, self.prefixes, self.early, fail)

    def add(self, server: PeerServer, sequence: DecodeSequence, offer: KVOffer) -> None:
        """Queue an offer, or decline an offer whose blocks cannot be pulled or cannot hold the prompt."""
        if server.pool is None:  # the path was lost and is not proven again
            problem, code = "its pool is not mapped here", ErrorCode.HANDOFF_LOST
        else:
            offered, code = server.pool.shape.by_group(unpack_ids(offer.block_ids)), ErrorCode.INTERNAL
            problem = flaw(offered, sequence, self.scheduler.layout)
        if problem:
            self.early.drop(*sequence.key)
            server.peer.decline(offer)
            self.fail(sequence.key, code, problem)
            return
        self.early.hints.pop(sequence.key, None)
        num_filled = num_handed_over(self.scheduler.layout, len(sequence.token_ids) - 1)
        source_ids = [ids[:count] for ids, count in zip(offered, num_filled, strict=True)]
        handoff = Handoff(sequence, server, offer, source_ids)
        self.waiting.add(handoff)
        self.prefixes.begin(handoff, was_begun=self.early.find(handoff) is not None)
        self._ask_for_next()

    def abort(self, request_id: str, attempt: int) -> None:
        """Give up every attempt up to `attempt`."""
        self.early.drop(request_id, attempt)
        for handoff in self.waiting.find(request_id, attempt):
            self._refuse(handoff)
        self.transfers.abort(request_id, attempt)

    def start_next(self) -> DecodeSequence | None:
        """Accept the next handoff and begin to pull, if there is a row and room."""
        handoff = self._next()
        if handoff is None or not self.prepare_next():
            return None
        self.waiting.remove(handoff)
        self.transfers.start(handoff)
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
            self.scheduler.layout.nothing if self.early.find(handoff) else self.prefixes.lacking(handoff)
        )

    def check(self) -> None:
        """Give up handoffs of lost memory servers, stale prompts pulled ahead, and handoffs at a standstill."""
        self.early.ahead.free_dropped()
        self._ask_for_next()
        first, under_way = self.waiting.first(), self.transfers.under_way
        is_still = first is not None and not under_way and not self.scheduler.capacity.num_taken
        if self.standstill.is_over(is_still=is_still, num_done=self.engine.shared.num_done) and first is not None:
            self._refuse(first)  # its own pool may wait for blocks held here
            reason = "no KV blocks come free for it, and nobody gets on in the pool"
            self.fail(first.sequence.key, ErrorCode.STANDSTILL, reason)
        self.early.follow_hint()
        in_use = {handoff.server for handoff in [*self.waiting, *under_way]}
        for server in self.sources.peers.check(in_use.__contains__):
            for handoff in [handoff for handoff in self.waiting if handoff.server is server]:
                self.waiting.remove(handoff)
                self.prefixes.forget(handoff)
                self.fail(handoff.sequence.key, ErrorCode.HANDOFF_LOST, server.problem)
            if server.pool is not None:
                self.early.ahead.drop_source(server.pool)
            self.sources.lose(server)

    def release_blocks(self) -> bool:
        """Give up blocks pulled ahead or granted; tell whether there were any.

        Blocks come free as copies end.
        """
        had_any = self.prefixes.release(self.waiting) or bool(self.early.ahead)
        self.early.drop_begun()
        return had_any

    def drop_all(self) -> None:
        """Decline every waiting handoff, and abort every pull."""
        self.early.ahead.drop_all()
        self.early.hints.clear()
        for handoff in list(self.waiting):
            self._refuse(handoff)
        self.transfers.abort_all()

    def _next(self) -> Handoff | None:
        """Return the next handoff if a pull may begin, and ask for blocks.

        A handoff with a grant passes a handoff without, because the missing grant may need the granted blocks.
        """
        handoff = self.waiting.first()
        if handoff is None or handoff.server.problem or len(self.transfers.under_way) >= self.max_pulls:
            return None
        self.prefixes.ask(handoff)
        if self.prefixes.awaits_blocks(handoff) and self.prefixes.granted:
            return min(self.prefixes.granted.values(), key=lambda each: self.waiting.rank(each.sequence))
        return handoff

    def _ask_for_next(self) -> None:
        """Ask for blocks of the handoffs to be pulled next, and of no others, because granted blocks lie idle."""
        num_more = self.max_pulls - len(self.prefixes.granted) - len(self.prefixes.asked)
        for handoff in self.waiting.next(self.max_pulls) if num_more > 0 and self.waiting else ():
            self.prefixes.ask(handoff)

    def _refuse(self, handoff: Handoff) -> None:
        """Decline a waiting handoff."""
        self.waiting.remove(handoff)
        self.prefixes.forget(handoff)
        self.early.drop(*handoff.sequence.key)
        handoff.server.peer.decline(handoff.offer)
