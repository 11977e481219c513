"""What prompts begin with, and others have computed: looked up, waited for, and sealed for those to come.

    arrived ──▶ asked ──PrefixFound──▶ known: computed from behind what was found
                  ▲                      │ another prompt computes the next block
                  └────that is sealed────┘ (held up)

Full blocks are sealed when the step that completed them is over. A prompt whose next block is being computed here for
another one waits for that, so equal prompts that arrive together are computed once. It waits for what is admitted only,
which needs nothing more to get on, and whose turn is before its own or which is launched whole: so it is not put off.

What is found is read, and so kept from others who want blocks. When blocks are short for long those that wait let go of
it, as all might wait for one another otherwise; they look again when they have blocks for all of their tokens.
"""

from collections.abc import Callable, Iterable

from common.memory.magazine import Magazine
from common.wire.block_key import digests, root_of
from common.wire.memory_messages import PrefixFound
from common.wire.packing import pack_ids
from prefill_worker.sequence import Key, PromptSequence

Tell = Callable[[PromptSequence], None]
"""Hears of a prompt of which something was found."""


class Prefixes:
    """Of all prompts here.

    Args:
        is_on: otherwise nothing is looked up or sealed, as where blocks cannot be used again.
        min_tokens: shorter prompts do not wait for an answer, but for others that compute what they begin with.
    """

    def __init__(
        self, magazine: Magazine, tell: Tell = lambda sequence: None, *, is_on: bool, min_tokens: int = 0
    ) -> None:
        self.magazine, self.tell, self.min_tokens = magazine, tell, min_tokens
        self.layout = magazine.shape.layout
        self.is_on = is_on and self.layout.is_reusable
        self.block_size = self.layout.groups[0].block_size
        self.asked: dict[Key, PromptSequence] = {}
        self.computing: dict[bytes, PromptSequence] = {}  # who will seal the block of that digest next

    def begin(self, sequence: PromptSequence, salt: bytes) -> None:
        """Look a prompt up, unless something is wanted of the computation itself."""
        if self.is_on:
            sequence.root = root_of(self.layout, salt)
            sequence.digests = digests(sequence.root, pack_ids(sequence.token_ids), self.block_size)
            if not sequence.num_prompt_logprobs and len(sequence.token_ids) >= self.min_tokens:
                self.ask(sequence)

    def ask(self, sequence: PromptSequence) -> None:
        """Look for what follows the blocks that are known to be there; at least one token is computed."""
        num_usable = (len(sequence.token_ids) - 1) // self.block_size
        if wanted := sequence.digests[sequence.num_sealed : num_usable]:
            self.asked[sequence.key] = sequence
            self.magazine.look_up(*sequence.key, wanted)

    def hear(self, message: PrefixFound) -> None:
        """What there is of a prompt; it may be gone meanwhile."""
        block_ids = self.magazine.found(message)
        sequence = self.asked.pop((message.request_id, message.attempt), None)
        if sequence is None:
            self.magazine.free(block_ids)
        elif block_ids:
            sequence.found += block_ids
            self._begin_behind(sequence)
            self.tell(sequence)
        if sequence is not None and sequence.asks_again:
            sequence.asks_again = False
            self.ask(sequence)

    def is_held_up(self, sequence: PromptSequence) -> bool:
        """Whether it waits for an answer, or for what another one computes; not what is admitted."""
        if sequence.is_started:
            return False
        if sequence.key in self.asked:
            return True
        other = self.computing.get(sequence.next_digest) if not sequence.num_prompt_logprobs else None
        return other is not None and (not other.num_left or _turn(other) <= _turn(sequence))

    def admitted(self, sequence: PromptSequence) -> None:
        """It computes its blocks from now on."""
        sequence.found = []
        self._compute_next(sequence)

    def computed(self, sequence: PromptSequence, num_tokens: int, waiting: Iterable[PromptSequence]) -> None:
        """A step is over behind which so many tokens are: full blocks are sealed, and those that wait look again."""
        begin, end = sequence.num_sealed, min(num_tokens // self.block_size, len(sequence.digests))
        if begin >= end:
            return
        self._compute_no_more(sequence)
        sealed = sequence.digests[begin:end]
        self.magazine.seal(sequence.tables[0].block_ids[begin:end], sealed)
        sequence.num_sealed = end
        self._compute_next(sequence)
        for other in waiting:
            if other.digests[begin : begin + 1] != sealed[:1]:
                continue
            if other.key in self.asked:
                other.asks_again = True  # the answer that is on its way may not know
            elif other.next_digest in sealed:
                self.ask(other)

    def let_go(self, sequences: Iterable[PromptSequence]) -> None:
        """Those that wait for blocks, and have waited for long, keep none from others.

        Not amid a question, as its answer goes on where the last one ended.
        """
        for sequence in sequences:
            if sequence.found and sequence.key not in self.asked:
                self.magazine.free(sequence.found)
                sequence.found, sequence.looks_again = [], True
                self._begin_behind(sequence)

    def looks_again(self, sequence: PromptSequence) -> bool:
        """Whether one that has let go, and now has blocks for all of its tokens, waits for an answer first."""
        if not sequence.looks_again:
            return False
        sequence.looks_again = False
        self.ask(sequence)
        return True

    def forget(self, sequence: PromptSequence) -> None:
        """It is complete, or given up: nobody waits for it any more."""
        self.asked.pop(sequence.key, None)
        self._compute_no_more(sequence)
        if sequence.found:
            self.magazine.free(sequence.found)
            sequence.found = []

    def _begin_behind(self, sequence: PromptSequence) -> None:
        """Behind what was found of it."""
        sequence.num_sealed = len(sequence.found)
        sequence.num_scheduled_tokens = sequence.num_sealed * self.block_size

    def _compute_next(self, sequence: PromptSequence) -> None:
        if sequence.next_digest:
            self.computing.setdefault(sequence.next_digest, sequence)

    def _compute_no_more(self, sequence: PromptSequence) -> None:
        if self.computing.get(sequence.next_digest) is sequence:
            del self.computing[sequence.next_digest]


def _turn(sequence: PromptSequence) -> tuple[int, int]:
    return sequence.priority, sequence.turn


def last_digest(sequence: PromptSequence) -> bytes:
    """Of its last full block, or where its chain begins; b"" if nothing is to be sealed."""
    return sequence.digests[-1] if sequence.digests else sequence.root
