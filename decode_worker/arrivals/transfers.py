"""Pulls under way: blocks copied from other pools into reserved blocks here.

The running batch never waits for a pull, because pulls use a stream of their own and are polled. A pull counts only if
the connection to the source's memory server stands when the pull is over. Lost handoffs go back to the router, which
replays the requests.
"""

from collections.abc import Sequence

from common.base.errors import ErrorCode
from common.kv.copies import missing
from common.kv.pool import KVPool
from common.kv.tables import tables_handed_over
from common.serving.prompts.requests import Fail, is_attempt
from common.wire.values.step_counts import PullMeter
from decode_worker.arrivals.early import EarlyPulls
from decode_worker.arrivals.prefixes import Prefixes
from decode_worker.arrivals.pulled_prompt import Handoff
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sequence import DecodeSequence


class Transfers:
    """Owner of handoffs being pulled; the scheduler owns their sequences.

    Args:
        pool: the own pool.
    """

    def __init__(
        self, pool: KVPool, scheduler: DecodeScheduler, prefixes: Prefixes, early: EarlyPulls, fail: Fail
    ) -> None:
        self.pool, self.scheduler, self.prefixes, self.early, self.fail = pool, scheduler, prefixes, early, fail
        self.under_way: list[Handoff] = []
        self.meter = PullMeter()

    def start(self, handoff: Handoff) -> None:
        """Accept a handoff, reserve its row and blocks, and pull blocks neither found nor pulled ahead."""
        handoff.server.peer.accept(handoff.offer)
        sequence, begun = handoff.sequence, self.early.find(handoff)
        grant = self.prefixes.take(handoff)
        here: Sequence[Sequence[int]] = [[] for _ in handoff.source_ids]
        blocks = here if grant is None else [f + g for f, g in zip(grant.found, grant.fresh, strict=True)]
        tables = tables_handed_over(self.scheduler.layout, len(sequence.token_ids) - 1, blocks)
        if grant is not None:
            here = grant.found
        if begun is not None:
            self.early.ahead.take(sequence.key)
            tables, here, handoff.copies = begun.tables, begun.source_ids, begun.copies
        self.early.drop(*sequence.key)  # an entry that does not match the offer
        self.scheduler.reserve(sequence, tables)
        rest = missing(sequence.tables, handoff.source_ids, here)
        assert handoff.server.pool is not None, "what waits was offered in a pool that is mapped"
        if rest.source_ids:
            handoff.copies.start(handoff.server.pool, rest.source_ids, self.pool, rest.target_ids)
        self.under_way.append(handoff)

    def collect(self) -> list[DecodeSequence]:
        """Return sequences whose blocks have arrived; free the source blocks."""
        over = [handoff for handoff in self.under_way if handoff.copies.over()]
        for server in {handoff.server for handoff in over}:
            server.peer.poll()
        arrived = []
        for handoff in over:
            self.under_way.remove(handoff)
            problem = handoff.copies.problem or handoff.server.problem
            handoff.server.peer.free(handoff.offer)
            self.meter.note(handoff.copies.num_pulls, handoff.copies.num_bytes, handoff.copies.seconds)
            if not handoff.aborted and not problem:
                self.prefixes.arrived(handoff)
                arrived.append(handoff.sequence)
                continue
            self.scheduler.unreserve(handoff.sequence)
            if not handoff.aborted:
                self.fail(handoff.sequence.key, ErrorCode.HANDOFF_LOST, problem)
        return arrived

    def abort(self, request_id: str, attempt: int) -> None:
        """Drop every attempt up to `attempt` when its copies are over."""
        for handoff in self.under_way:
            handoff.aborted |= is_attempt(handoff.sequence.key, request_id, attempt)

    def abort_all(self) -> None:
        for handoff in self.under_way:
            handoff.aborted = True
