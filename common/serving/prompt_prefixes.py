"""What prompts begin with, and others have computed: looked up, waited for, and sealed for those to come.

    arrived ──▶ asked ──PrefixFound──▶ known: computed from behind what was found
                  ▲ │                    ▲ │ another prompt computes the next block
                  │ └─▶ looked for elsewhere, where some of it may be
                  └─────that is sealed─────┘ (held up)

Full blocks are sealed when the step that completed them is over. A prompt whose next block is being computed here for
another one waits for that, so equal prompts that arrive together are computed once. It waits for what is admitted only,
which needs nothing more to get on, and whose turn is before its own or which is launched whole: so it is not put off.

What is found is read, and so kept from others who want blocks. When blocks are short for long those that wait let go of
it, as all might wait for one another otherwise; they look again when they have blocks for all of their tokens. So do
those of whom more is in host memory, for which no blocks were free. Whoever looks again gives as many back, once, as it
hopes to find: what has left the pool meanwhile comes back in these.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from common.kv.tables import Tables
from common.memory.magazine import Magazine
from common.memory_sections import KVSection
from common.serving.beginning import Beginning
from common.serving.inquiry import Key
from common.serving.prompt_order import Prompt
from common.serving.prompt_rate import PromptRate
from common.serving.shortage import Shortage
from common.wire.block_key import TextDigests, root_of
from common.wire.memory_messages import PrefixFound
from common.wire.packing import pack_ids


class KnownPrompt(Prompt, Protocol):
    """A prompt whose beginning may be known; `key`, `token_ids` and what is asked of it are given."""

    beginning: Beginning
    num_scheduled_tokens: int  # computed by the steps launched so far

    @property
    def key(self) -> Key:
        """(request_id, attempt)."""

    @property
    def token_ids(self) -> Sequence[int]:
        """All that is to be computed."""

    @property
    def num_prompt_logprobs(self) -> int:
        """Above 0 if something is wanted of the computation itself."""

    @property
    def tables(self) -> Tables:
        """Of its blocks, once it is admitted."""


AnyPrompt = TypeVar("AnyPrompt", bound=KnownPrompt)


class PromptPrefixes(Generic[AnyPrompt]):
    """Of all prompts here.

    Args:
        tell: hears of a prompt of which something was found.
        section: whether anything is looked up and sealed, where blocks can be used again; shorter prompts than it says
            do not wait for an answer, but for others that compute what they begin with.
    """

    def __init__(
        self,
        magazine: Magazine,
        tell: Callable[[AnyPrompt], None],
        section: KVSection,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.magazine, self.tell, self._shortage = magazine, tell, Shortage(clock)
        self.layout, self.min_tokens = magazine.shape.layout, section.prefix_min_tokens
        self.is_on = section.prefix_cache and self.layout.is_reusable
        self.block_size = self.layout.groups[0].block_size
        self.rate = PromptRate()
        self._digests = TextDigests(self.block_size)
        self.look_elsewhere: Callable[[AnyPrompt], bool] = lambda prompt: False  # whether it says what `arrived`
        self.asked: dict[Key, AnyPrompt] = {}
        self.computing: dict[bytes, AnyPrompt] = {}  # who will seal the block of that digest next

    @property
    def block_us(self) -> int:
        """What computing a block takes."""
        return self.rate.block_us(self.block_size)

    def begin(self, prompt: AnyPrompt, salt: bytes) -> None:
        """Look a prompt up."""
        if self.is_on:
            root = prompt.beginning.root = root_of(self.layout, salt)
            prompt.beginning.digests = self._digests.of(root, pack_ids(prompt.token_ids))
            if len(prompt.token_ids) >= self.min_tokens:
                self.ask(prompt)

    def ask(self, prompt: AnyPrompt) -> None:
        """Look for what follows the blocks that are known to be there."""
        if wanted := self.lacking(prompt):
            self.asked[prompt.key] = prompt
            self.magazine.look_up(*prompt.key, wanted, self.block_us)

    def lacking(self, prompt: AnyPrompt) -> list[bytes]:
        """Digests of its blocks that would not be computed if they were there: at least one token is computed, and all
        where something is wanted of the computation itself.
        """
        if prompt.num_prompt_logprobs:
            return []
        beginning = prompt.beginning
        return beginning.digests[beginning.num_sealed : (len(prompt.token_ids) - 1) // self.block_size]

    def has_asked(self, message: PrefixFound) -> bool:
        """Whether the answer is to one of these."""
        return (message.request_id, message.attempt) in self.asked

    def hear(self, message: PrefixFound) -> None:
        """What there is of a prompt; it may be gone meanwhile."""
        key = message.request_id, message.attempt
        prompt = self.asked.get(key)
        self.arrived(key, self.magazine.found(message))
        if prompt is None:
            return
        if message.num_parked and not prompt.beginning.has_given:
            prompt.beginning.looks_again, prompt.beginning.num_hoped = True, message.num_parked
        elif prompt.key not in self.asked and self.look_elsewhere(prompt):
            self.asked[prompt.key] = prompt

    def arrived(self, key: Key, block_ids: list[int]) -> None:
        """These blocks, which are sealed and read here, are all that was found of a prompt, which may be gone."""
        prompt = self.asked.pop(key, None)
        if prompt is None:
            self.magazine.free(block_ids)
        elif block_ids:
            prompt.beginning.found += block_ids
            self._begin_behind(prompt)
            self.tell(prompt)
        if prompt is not None and prompt.beginning.asks_again:
            prompt.beginning.asks_again = False
            self.ask(prompt)

    def is_held_up(self, prompt: AnyPrompt) -> bool:
        """Whether it waits for an answer, or for what another one computes; not what is admitted."""
        if prompt.is_started:
            return False
        if prompt.key in self.asked:
            return True
        lacking = self.lacking(prompt)
        other = self.computing.get(lacking[0]) if lacking else None
        return other is not None and (not other.num_left or _turn(other) <= _turn(prompt))

    def lack(self, waiting: Iterable[AnyPrompt]) -> None:
        """There are too few blocks for a prompt; after a while nobody who waits keeps any."""
        if self._shortage.lasts():
            self.let_go(waiting)

    def looks_again(self, prompt: AnyPrompt) -> bool:
        """There are blocks for all of a prompt's tokens; whether it waits for an answer first, as it has let go."""
        self._shortage.ends()
        beginning = prompt.beginning
        if not beginning.looks_again:
            return False
        beginning.looks_again = False
        if not beginning.has_given:
            beginning.has_given = True
            self.magazine.give_back(beginning.num_hoped)
        self.ask(prompt)
        return True

    def admitted(self, prompt: AnyPrompt) -> None:
        """It computes its blocks from now on."""
        prompt.beginning.found = []
        self._compute_next(prompt)

    def computed(self, reached: Iterable[tuple[AnyPrompt, int]], waiting: Iterable[AnyPrompt]) -> None:
        """A step is over behind which so many tokens of each are: full blocks are sealed, and who waits looks again."""
        sealed = {digest for prompt, num_tokens in reached for digest in self._seal(prompt, num_tokens)}
        for other in waiting if sealed else ():
            if other.key in self.asked:  # the answer that is on its way may not know
                other.beginning.asks_again |= not sealed.isdisjoint(other.beginning.digests)
            elif other.beginning.next_digest in sealed:
                self.ask(other)

    def let_go(self, prompts: Iterable[AnyPrompt]) -> bool:
        """Those that wait for blocks, and have waited for long, keep none from others; whether there were any.

        Not amid a question, as its answer goes on where the last one ended.
        """
        keepers = [prompt for prompt in prompts if prompt.beginning.found and prompt.key not in self.asked]
        for prompt in keepers:
            beginning = prompt.beginning
            self.magazine.free(beginning.found)
            beginning.num_hoped += len(beginning.found)
            beginning.found, beginning.looks_again = [], True
            self._begin_behind(prompt)
        return bool(keepers)

    def forget(self, prompt: AnyPrompt) -> None:
        """It is complete, or given up: nobody waits for it any more."""
        self.asked.pop(prompt.key, None)
        self._compute_no_more(prompt)
        if prompt.beginning.found:
            self.magazine.free(prompt.beginning.found)
            prompt.beginning.found = []

    def _begin_behind(self, prompt: AnyPrompt) -> None:
        """Behind what was found of it."""
        prompt.beginning.num_sealed = len(prompt.beginning.found)
        prompt.num_scheduled_tokens = prompt.beginning.num_sealed * self.block_size

    def _seal(self, prompt: AnyPrompt, num_tokens: int) -> Sequence[bytes]:
        """Full blocks of its first tokens, but those that are; returns their digests."""
        beginning = prompt.beginning
        begin, end = beginning.num_sealed, min(num_tokens // self.block_size, len(beginning.digests))
        if begin >= end:
            return ()
        self._compute_no_more(prompt)
        sealed = beginning.digests[begin:end]
        self.magazine.seal(prompt.tables[0].block_ids[begin:end], sealed)
        beginning.num_sealed = end
        self._compute_next(prompt)
        return sealed

    def _compute_next(self, prompt: AnyPrompt) -> None:
        if digest := prompt.beginning.next_digest:
            self.computing.setdefault(digest, prompt)

    def _compute_no_more(self, prompt: AnyPrompt) -> None:
        digest = prompt.beginning.next_digest
        if self.computing.get(digest) is prompt:
            del self.computing[digest]


def _turn(prompt: KnownPrompt) -> tuple[int, int]:
    return prompt.priority, prompt.turn
