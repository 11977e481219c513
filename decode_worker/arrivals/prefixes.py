"""Cached blocks of prompts computed in another pool: looked up instead of pulled, and sealed for later prompts.

    offered ──its turn is near──▶ asked ──PromptBlocks──▶ granted: pulled behind the found prefix ──arrived──▶ sealed.
                                    ▲                        │ blocks wanted by decoding sequences
                                    └────────────────────────┘

The memory server grants all blocks of a handoff at once. Some are sealed and hold the first tokens; the others are to
be pulled into. A handoff that waits for a grant holds no blocks.
"""

from collections import deque
from collections.abc import Callable, Iterable
from functools import reduce

from common.kv.tables import num_seen
from common.memory.client.lease_cache import Grant
from common.memory.client.shared_pool import SharedPool
from common.serving.prompts.requests import Key
from common.wire.messages.memory import PromptBlocks
from common.wire.values.block_key import TextDigests
from common.wire.values.kv_layout import Counts
from common.wire.values.packing import pack_ids
from common.wire.values.pool_shape import plus
from decode_worker.arrivals.pulled_prompt import Handoff
from decode_worker.sequences.sealing import Sealing

REMEMBERED = 8
"""Handoffs remembered; the largest sets the blocks kept at hand for the next."""


class Prefixes:
    """Owner of blocks granted to waiting handoffs.

    Args:
        shared: this worker's own pool.
        min_tokens: shorter prompts are sealed, but not looked up.
        reserve: returns free blocks that sealing leaves at hand, by group.
    """

    def __init__(self, shared: SharedPool, *, min_tokens: int = 0, reserve: Callable[[], Counts] | None = None) -> None:
        self.shared, self.leases, self.min_tokens = shared, shared.leases, min_tokens
        self.sealing = Sealing(self.leases, reserve)
        self.layout = shared.leases.shape.layout
        self._digests = TextDigests(self.layout.block_size)
        self.asked: dict[Key, Handoff] = {}
        self.granted: dict[Key, Handoff] = {}  # handoffs that wait with granted blocks
        self.latest: deque[Counts] = deque(maxlen=REMEMBERED)  # blocks of the latest handoffs that are not looked up
        self.num_found = self.num_pulled = 0  # blocks of handoffs with a row, since the start

    def begin(self, handoff: Handoff, *, was_begun: bool) -> None:
        """Compute the keys of a handoff, if it can be sealed; look the handoff up unless begun ahead or short."""
        if handoff.offer.root and self.layout.is_reusable:
            prompt, handoff.root = handoff.sequence.token_ids[:-1], handoff.offer.root
            handoff.digests = self._digests.of(handoff.root, pack_ids(prompt))
            handoff.is_looked_up = bool(handoff.digests) and not was_begun and len(prompt) >= self.min_tokens
        if not handoff.is_looked_up:
            self.latest.append(self.lacking(handoff))

    def ask(self, handoff: Handoff) -> None:
        """Ask the memory server once for all blocks of a handoff to be looked up."""
        if handoff.is_looked_up and handoff.grant is None and handoff.sequence.key not in self.asked:
            sequence = handoff.sequence
            self.asked[sequence.key] = handoff
            counts, priority = num_seen(self.layout, len(sequence.token_ids)), sequence.request.priority
            self.leases.want_prompt(sequence.key, handoff.digests, counts, priority, resumes=False)

    def receive(self, message: PromptBlocks) -> None:
        """Take over granted blocks, or free the blocks if the handoff is gone."""
        grant = self.leases.granted(message)
        handoff = self.asked.pop((message.request_id, message.attempt), None)
        if handoff is None:
            self.leases.free(grant.block_ids)
        else:
            handoff.grant = grant
            self.granted[handoff.sequence.key] = handoff

    def awaits_blocks(self, handoff: Handoff) -> bool:
        """Tell whether a handoff still needs an answer, asked for or not."""
        return handoff.is_looked_up and handoff.grant is None and not self.shared.problem

    def lacking(self, handoff: Handoff) -> Counts:
        """Return blocks to be taken from the blocks at hand; nothing if the handoff has a grant."""
        return num_seen(self.layout, len(handoff.sequence.token_ids)) if handoff.grant is None else self.layout.nothing

    def release(self, waiting: Iterable[Handoff]) -> bool:
        """Give back blocks granted to waiting handoffs; tell whether there were any.

        The handoffs ask again in turn.
        """
        keepers = [handoff for handoff in waiting if handoff.grant is not None]
        for handoff in keepers:
            self._release(handoff)
        return bool(keepers)

    def foreseen(self, next_ones: Iterable[Handoff]) -> Counts:
        """Return blocks for the next handoffs and for another like the largest of the latest.

        So no pull waits for blocks.
        """
        waiting = (self.lacking(handoff) for handoff in next_ones if not handoff.is_looked_up)
        return reduce(plus, waiting, max(self.latest, key=sum, default=self.layout.nothing))

    def take(self, handoff: Handoff) -> Grant | None:
        """Return the granted blocks, if any, of a handoff that has room; found blocks are not pulled."""
        grant, handoff.grant = handoff.grant, None
        num_found = 0 if grant is None else sum(map(len, grant.found))
        handoff.sequence.chain.num_blocks = 0 if grant is None else grant.num_places
        self.asked.pop(handoff.sequence.key, None)
        self.granted.pop(handoff.sequence.key, None)
        self.num_found += num_found
        self.num_pulled += sum(map(len, handoff.source_ids)) - num_found
        return grant

    def arrived(self, handoff: Handoff) -> None:
        """Seal pulled blocks for later prompts; decoding goes on with the handoff's chain of keys."""
        if not handoff.root:
            return
        num_found = handoff.sequence.chain.num_blocks
        self.sealing.begin_pulled(handoff.sequence, handoff.root, handoff.digests, num_found)

    def forget(self, handoff: Handoff) -> None:
        """Withdraw the question and free the grant of a handoff that will not be pulled."""
        if self.asked.pop(handoff.sequence.key, None) is not None:
            self.leases.unwant_prompt(handoff.sequence.key)
        if handoff.grant is not None:
            self._release(handoff)

    def _release(self, handoff: Handoff) -> None:
        assert handoff.grant is not None
        self.leases.free(handoff.grant.block_ids)
        handoff.grant = None
        del self.granted[handoff.sequence.key]
