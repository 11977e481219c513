"""What our pool has of prompts that were computed in another: looked up, not pulled, and sealed for those to come.

    offered ──▶ asked ──PrefixFound──▶ known: pulled from behind what was found ──arrived──▶ sealed
                  ▲                      │ blocks are short for long
                  └─blocks for all of it─┘ (let go)

What is found is read, and so kept from others who want blocks. When blocks are short for long those that wait let go of
it, as all might wait for one another otherwise; they look again when there are blocks for all of their tokens.
"""

import time
from collections.abc import Callable, Iterable

from common.kv.tables import num_seen
from common.memory.shared_pool import SharedPool
from common.serving.shortage import Shortage
from common.wire.block_key import TextDigests
from common.wire.fields import ID_BYTES
from common.wire.kv_layout import Counts
from common.wire.memory_messages import PrefixFound
from decode_worker.handoff import Handoff
from decode_worker.sequence import Key


class Prefixes:
    """Of all handoffs that wait.

    Args:
        shared: our own pool.
        min_tokens: shorter prompts are sealed, and not looked up.
    """

    def __init__(self, shared: SharedPool, *, min_tokens: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.shared, self.magazine, self.min_tokens = shared, shared.magazine, min_tokens
        self.layout = shared.magazine.shape.layout
        self._digests = TextDigests(self.layout.groups[0].block_size)
        self.asked: dict[Key, Handoff] = {}
        self.num_found = self.num_pulled = 0  # blocks of handoffs that had room, since the start
        self._shortage = Shortage(clock)

    def begin(self, handoff: Handoff, *, was_begun: bool) -> bool:
        """Make its keys, and look it up unless it was begun ahead or is short; whether an answer is to come."""
        if not self._is_reusable(handoff):
            return False
        prompt = handoff.offer.token_ids[:-ID_BYTES]
        handoff.digests = self._digests.of(handoff.offer.root, prompt)
        if was_begun or not handoff.digests or len(prompt) < self.min_tokens * ID_BYTES:
            return False
        self._ask(handoff)
        return True

    def hear(self, message: PrefixFound) -> Handoff | None:
        """What there is of a handoff, which it is; it may be gone meanwhile."""
        block_ids = self.magazine.found(message)
        handoff = self.asked.pop((message.request_id, message.attempt), None)
        if handoff is None:
            self.magazine.free(block_ids)
        else:
            handoff.found = block_ids
        return handoff

    def is_asked(self, handoff: Handoff) -> bool:
        """Whether an answer is to come."""
        return handoff.sequence.key in self.asked and not self.shared.problem

    def lacking(self, handoff: Handoff) -> Counts:
        """Blocks for all of its tokens, but for those that were found."""
        first, *others = num_seen(self.layout, len(handoff.sequence.token_ids))
        return (first - len(handoff.found), *others)

    def looks_again(self, handoff: Handoff) -> bool:
        """Whether one that has let go, and now has blocks for all of its tokens, waits for an answer first."""
        if not handoff.looks_again:
            return False
        handoff.looks_again = False
        self._ask(handoff)
        return True

    def lack(self, waiting: Iterable[Handoff]) -> None:
        """Blocks are short; after a while nobody who waits keeps any."""
        if self._shortage.lasts():
            self.let_go(waiting)

    def let_go(self, waiting: Iterable[Handoff]) -> bool:
        """Keep nothing for those that wait; whether there was anything."""
        keepers = [handoff for handoff in waiting if handoff.found]
        for handoff in keepers:
            self.magazine.free(handoff.found)
            handoff.found, handoff.looks_again = [], True
        return bool(keepers)

    def take(self, handoff: Handoff) -> list[int]:
        """It has room: what was found is the sequence's own to read, and the rest is pulled."""
        self._shortage.ends()
        self.asked.pop(handoff.sequence.key, None)
        found, handoff.found = handoff.found, []
        handoff.sequence.num_sealed = len(found)
        self.num_found += len(found)
        self.num_pulled += sum(map(len, handoff.source_ids)) - len(found)
        return found

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
        self.asked.pop(handoff.sequence.key, None)
        self.magazine.free(handoff.found)
        handoff.found = []

    def _ask(self, handoff: Handoff) -> None:
        self.asked[handoff.sequence.key] = handoff
        self.magazine.look_up(*handoff.sequence.key, handoff.digests)

    def _is_reusable(self, handoff: Handoff) -> bool:
        """Whether its prefill worker seals, and blocks of the layout can be used again."""
        return bool(handoff.offer.root) and self.layout.is_reusable
