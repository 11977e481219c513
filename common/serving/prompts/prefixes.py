"""What prompts begin with, and others have computed: looked up, waited for, and sealed for those to come.

    arrived ──▶ asked ──PromptBlocks──▶ granted: all its blocks, computed from behind what was found ──▶ admitted
      ▲  another prompt computes its next block (held up)      │ more of it was sealed since
      └──────────────────────────────────────────────────────── ┘

The memory server gives a prompt all of its blocks at once: those that hold its first tokens already, and those to fill.
A prompt that waits for them holds none. Full blocks are sealed when the step that completed them is over.

A prompt whose next block is being computed here for another one waits for that, so equal prompts that arrive together
are computed once. It waits for what is admitted only, which needs nothing more to get on, and whose turn is before its
own or which is launched whole: so it is not put off.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from common.kv.tables import Tables
from common.memory.client.magazine import Grant, Magazine
from common.serving.prompts.inquiry import Key
from common.serving.prompts.order import Prompt, turn_of
from common.serving.prompts.rate import PromptRate
from common.settings.memory_sections import KVSection
from common.wire.messages.memory import PromptBlocks
from common.wire.values.block_key import TextDigests, root_of
from common.wire.values.kv_layout import Counts
from common.wire.values.packing import pack_ids


@dataclass(slots=True)
class Beginning:
    """The chain of keys of one prompt, and its blocks until it is admitted."""

    root: bytes = b""  # where its digests begin; b"" if none of its blocks is looked up or sealed
    digests: list[bytes] = field(default_factory=list)  # of its full blocks
    num_sealed: int = 0  # of those, from the first on: found, or computed
    grant: Grant | None = None  # all of its blocks, until it is admitted
    is_outdated: bool = False  # more of it was sealed since its blocks were asked for
    is_filling: bool = False  # some blocks of the grant are lent, to be filled from another pool

    @property
    def next_digest(self) -> bytes:
        """The first full block that is not sealed; b"" when all are."""
        return self.digests[self.num_sealed] if self.num_sealed < len(self.digests) else b""

    @property
    def last_digest(self) -> bytes:
        """The last full block, or where the chain begins; b"" if nothing is to be sealed."""
        return self.digests[-1] if self.digests else self.root

    @property
    def granted(self) -> list[int]:
        """Blocks of the grant, but for those that are lent."""
        return [] if self.grant is None else [*self.grant.found, *self.grant.fresh]


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
    def num_slots(self) -> int:
        """Tokens that it gets blocks for: also the first output, if others may follow."""

    @property
    def num_prompt_logprobs(self) -> int:
        """Above 0 if something is wanted of the computation itself."""

    @property
    def tables(self) -> Tables:
        """Of its blocks, once it is admitted."""


AnyPrompt = TypeVar("AnyPrompt", bound=KnownPrompt)


class PromptPrefixes(Generic[AnyPrompt]):
    """Owner of what is granted to prompts that wait.

    Args:
        tell: hears of a prompt of which something was found.
        section: whether anything is looked up and sealed, where blocks can be used again. Prompts shorter than
            `prefix_min_tokens` take blocks at hand, unless another one computes what they begin with.
        has_blocks: whether so many blocks are at hand for a prompt.
    """

    def __init__(
        self,
        magazine: Magazine,
        tell: Callable[[AnyPrompt], None],
        section: KVSection,
        has_blocks: Callable[[Counts], bool] | None = None,
    ) -> None:
        self.magazine, self.tell, self.has_blocks = magazine, tell, has_blocks or magazine.fetch
        self.layout, self.min_tokens = magazine.shape.layout, section.prefix_min_tokens
        self.is_on = section.prefix_cache and self.layout.is_reusable
        self.block_size = self.layout.groups[0].block_size
        self.rate = PromptRate()
        self._digests = TextDigests(self.block_size)
        self.look_elsewhere: Callable[[AnyPrompt], None] = lambda prompt: None  # hears of what was granted
        self.asked: dict[Key, AnyPrompt] = {}
        self.computing: dict[bytes, AnyPrompt] = {}  # the prompt that will seal the block of that digest next

    @property
    def block_us(self) -> int:
        """What computing a block takes."""
        return self.rate.block_us(self.block_size)

    def begin(self, prompt: AnyPrompt, salt: bytes) -> None:
        """Make the keys of a prompt, and ask for its blocks unless another one computes some of them."""
        if self.is_on:
            root = prompt.beginning.root = root_of(self.layout, salt)
            prompt.beginning.digests = self._digests.of(root, pack_ids(prompt.token_ids))
            if self._is_looked_up(prompt) and not self.is_held_up(prompt):
                self._ask(prompt)

    def lacking(self, prompt: AnyPrompt) -> list[bytes]:
        """Digests of blocks that would not be computed if they were there.

        At least one token is computed, and all where something is wanted of the computation itself.
        """
        if prompt.num_prompt_logprobs:
            return []
        beginning = prompt.beginning
        return beginning.digests[beginning.num_sealed : (len(prompt.token_ids) - 1) // self.block_size]

    def has_asked(self, message: PromptBlocks) -> bool:
        """Whether the answer is to one of these."""
        return (message.request_id, message.attempt) in self.asked

    def hear(self, message: PromptBlocks) -> None:
        """Take over the blocks of a prompt, which may be gone meanwhile."""
        prompt, grant = self.asked.pop((message.request_id, message.attempt), None), self.magazine.granted(message)
        if prompt is None:
            self.magazine.free([*grant.found, *grant.fresh])
            return
        beginning = prompt.beginning
        beginning.grant, is_outdated, beginning.is_outdated = grant, beginning.is_outdated, False
        if grant.found:
            self._begin_behind(prompt)
        if is_outdated and self.lacking(prompt):
            self._release(prompt)
            self._ask(prompt)
        else:
            self.look_elsewhere(prompt)

    def is_held_up(self, prompt: AnyPrompt) -> bool:
        """Whether it waits for blocks, or for what another one computes; not what is admitted."""
        if prompt.is_started:
            return False
        if prompt.key in self.asked or prompt.beginning.is_filling:
            return True
        lacking = self.lacking(prompt)
        other = self.computing.get(lacking[0]) if lacking else None
        return other is not None and (not other.num_left or turn_of(other) <= turn_of(prompt))

    def take_blocks(self, prompt: AnyPrompt, counts: Counts) -> Sequence[list[int]] | None:
        """Take all blocks of a prompt that is admitted, by group; None if it has to wait for them.

        Args:
            counts: how many it has of each group.
        """
        grant = prompt.beginning.grant
        if grant is None and self._is_looked_up(prompt):
            self._ask(prompt)
            return None
        if not self.has_blocks(counts if grant is None else self.layout.nothing):
            return None
        blocks = self.magazine.allocate(counts) if grant is None else [prompt.beginning.granted]
        prompt.beginning.grant = None
        self._compute_next(prompt)
        return blocks

    def computed(self, reached: Iterable[tuple[AnyPrompt, int]], waiting: Iterable[AnyPrompt]) -> None:
        """A step is over behind which so many tokens of each are: seal full blocks, for which others may wait."""
        sealed = {digest for prompt, num_tokens in reached for digest in self._seal(prompt, num_tokens)}
        if sealed:
            self.sealed(sealed, waiting)

    def sealed(self, digests: Container[bytes], waiting: Iterable[AnyPrompt]) -> None:
        """Let prompts that wait for one of these ask anew for their blocks, or once an answer on its way is here."""
        for prompt in waiting:
            beginning = prompt.beginning
            if prompt.key in self.asked:
                beginning.is_outdated |= any(digest in digests for digest in beginning.digests)
            elif beginning.next_digest in digests and not beginning.is_filling:
                self._release(prompt)
                self._ask(prompt)

    def let_go(self, prompts: Iterable[AnyPrompt]) -> bool:
        """Give back what was granted to prompts that wait; whether there was anything. They ask again in their turn."""
        keepers = [prompt for prompt in prompts if prompt.beginning.grant and not prompt.beginning.is_filling]
        for prompt in keepers:
            self._release(prompt)
        return bool(keepers)

    def forget(self, prompt: AnyPrompt) -> None:
        """It is complete, or given up: others do not wait for it any more."""
        if self.asked.pop(prompt.key, None) is not None:
            self.magazine.unwant_prompt(prompt.key)
        self._compute_no_more(prompt)
        self._release(prompt)

    def lend(self, prompt: AnyPrompt, count: int) -> list[int]:
        """Take the first blocks to be filled out of a prompt's grant; the prompt waits until they are returned."""
        beginning = prompt.beginning
        assert beginning.grant is not None, "its blocks are granted"
        lent = beginning.grant.fresh[:count]
        del beginning.grant.fresh[:count]
        beginning.is_filling = True
        return lent

    def return_lent(self, prompt: AnyPrompt, sealed: Sequence[int], unfilled: Sequence[int] = ()) -> None:
        """Give back what was lent: blocks that are sealed now, and others; all are freed if the prompt is gone."""
        beginning = prompt.beginning
        beginning.is_filling = False
        if beginning.grant is None:
            self.magazine.free([*sealed, *unfilled])
            return
        beginning.grant.found.extend(sealed)
        beginning.grant.fresh[:0] = unfilled
        if sealed:
            self._begin_behind(prompt)

    def lose_lent(self, prompt: AnyPrompt) -> None:
        """What was lent is not returned: the prompt asks for all its blocks anew."""
        prompt.beginning.is_filling = False
        if prompt.beginning.grant is not None:
            self._release(prompt)
            self._ask(prompt)

    def _is_looked_up(self, prompt: AnyPrompt) -> bool:
        return self.is_on and len(prompt.token_ids) >= self.min_tokens and bool(self.lacking(prompt))

    def _ask(self, prompt: AnyPrompt) -> None:
        """Ask for all blocks of a prompt that has none."""
        num_blocks = self.layout.groups[0].num_places(prompt.num_slots)
        self.asked[prompt.key] = prompt
        self.magazine.want_prompt(prompt.key, self.lacking(prompt), num_blocks, prompt.priority, self.block_us)

    def _release(self, prompt: AnyPrompt) -> None:
        """Give back what was granted to a prompt, if anything was."""
        beginning = prompt.beginning
        if beginning.grant is not None:
            self.magazine.free(beginning.granted)
            beginning.grant = None
            beginning.num_sealed = prompt.num_scheduled_tokens = 0

    def _begin_behind(self, prompt: AnyPrompt) -> None:
        """Compute a prompt from behind what was found of it."""
        assert prompt.beginning.grant is not None, "its blocks are granted"
        prompt.beginning.num_sealed = len(prompt.beginning.grant.found)
        prompt.num_scheduled_tokens = prompt.beginning.num_sealed * self.block_size
        self.tell(prompt)

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
