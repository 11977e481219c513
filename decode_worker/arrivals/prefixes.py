"""What our pool has of prompts that were computed in another: looked up, not pulled, and sealed for those to come.

    offered ──its turn is near──▶ asked ──PromptBlocks──▶ granted: pulled from behind what was found ──arrived──▶ sealed
                                    ▲                        │ blocks wanted for what is decoded
                                    └────────────────────────┘

The memory server gives a handoff all of its blocks at once: those that hold its first tokens already, and those to pull
into. A handoff that waits for them holds none.
"""

from collections.abc import Iterable

from common.kv.tables import num_seen
from common.memory.client.magazine import Grant
from common.memory.client.shared_pool import SharedPool
from common.wire.messages.memory import PromptBlocks
from common.wire.values.block_key import TextDigests
from common.wire.values.kv_layout import Counts
from common.wire.values.packing import pack_ids
from decode_worker.arrivals.pulled_prompt import Handoff
from decode_worker.sequences.sequence import Key


class Prefixes:
    """Owner of what is granted to handoffs that wait.

    Args:
        shared: our own pool.
        min_tokens: shorter prompts are sealed, and not looked up.
    """

    def __init__(self, shared: SharedPool, *, min_tokens: int = 0) -> None:
        self.shared, self.magazine, self.min_tokens = shared, shared.magazine, min_tokens
        self.layout = shared.magazine.shape.layout
        self._digests = TextDigests(self.layout.groups[0].block_size)
        self.asked: dict[Key, Handoff] = {}
        self.granted: dict[Key, Handoff] = {}  # those that wait with their blocks
        self.num_found = self.num_pulled = 0  # blocks of handoffs that had room, since the start

    def begin(self, handoff: Handoff, *, was_begun: bool) -> None:
        """Make the keys of a handoff, which is to be looked up unless it was begun ahead or is short."""
        if not self._is_reusable(handoff):
            return
        prompt = handoff.sequence.token_ids[:-1]
        handoff.digests = self._digests.of(handoff.offer.root, pack_ids(prompt))
        handoff.is_looked_up = bool(handoff.digests) and not was_begun and len(prompt) >= self.min_tokens

    def ask(self, handoff: Handoff) -> None:
        """Ask for all blocks of a handoff that is to be looked up, once."""
        if handoff.is_looked_up and handoff.grant is None and handoff.sequence.key not in self.asked:
            sequence = handoff.sequence
            self.asked[sequence.key] = handoff
            num_blocks = num_seen(self.layout, len(sequence.token_ids))[0]
            self.magazine.want_prompt(sequence.key, handoff.digests, num_blocks, sequence.priority)

    def hear(self, message: PromptBlocks) -> None:
        """Take over the blocks of a handoff, which may be gone meanwhile."""
        grant = self.magazine.granted(message)
        handoff = self.asked.pop((message.request_id, message.attempt), None)
        if handoff is None:
            self.magazine.free([*grant.found, *grant.fresh])
        else:
            handoff.grant = grant
            self.granted[handoff.sequence.key] = handoff

    def awaits_blocks(self, handoff: Handoff) -> bool:
        """Whether an answer is to come, or has to be asked for."""
        return handoff.is_looked_up and handoff.grant is None and not self.shared.problem

    def lacking(self, handoff: Handoff) -> Counts:
        """Blocks at hand that it takes: none if its blocks are granted."""
        return num_seen(self.layout, len(handoff.sequence.token_ids)) if handoff.grant is None else self.layout.nothing

    def let_go(self, waiting: Iterable[Handoff]) -> bool:
        """Give back what is granted to those that wait; whether there was anything. They ask again in their turn."""
        keepers = [handoff for handoff in waiting if handoff.grant is not None]
        for handoff in keepers:
            self._release(handoff)
        return bool(keepers)

    def take(self, handoff: Handoff) -> Grant | None:
        """It has room: return its blocks, if they were granted; those that were found are not pulled."""
        grant, handoff.grant = handoff.grant, None
        num_found = 0 if grant is None else len(grant.found)
        handoff.sequence.num_sealed = num_found
        self.asked.pop(handoff.sequence.key, None)
        self.granted.pop(handoff.sequence.key, None)
        self.num_found += num_found
        self.num_pulled += sum(map(len, handoff.source_ids)) - num_found
        return grant

    def arrived(self, handoff: Handoff) -> None:
        """All of it is here: others find it, and decoding goes on with the chain of keys."""
        if not self._is_reusable(handoff):
            return
        sequence, chain = handoff.sequence, handoff.digests
        if pulled := chain[sequence.num_sealed :]:
            self.magazine.seal(sequence.tables[0].block_ids[sequence.num_sealed : len(chain)], pulled)
        sequence.num_sealed, sequence.digest = len(chain), chain[-1] if chain else handoff.offer.root

    def forget(self, handoff: Handoff) -> None:
        """It waits no more, and will not be pulled."""
        if self.asked.pop(handoff.sequence.key, None) is not None:
            self.magazine.unwant_prompt(handoff.sequence.key)
        if handoff.grant is not None:
            self._release(handoff)

    def _release(self, handoff: Handoff) -> None:
        assert handoff.grant is not None
        self.magazine.free([*handoff.grant.found, *handoff.grant.fresh])
        handoff.grant = None
        del self.granted[handoff.sequence.key]

    def _is_reusable(self, handoff: Handoff) -> bool:
        """Whether its prefill worker seals, and blocks of the layout can be used again."""
        return bool(handoff.offer.root) and self.layout.is_reusable
