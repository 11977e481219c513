"""Prompt prefixes computed before: looked up, waited for, and sealed for later prompts.

    arrived ──▶ asked ──PromptBlocks──▶ granted: all blocks; computed from behind the found blocks ──▶ admitted.
      ▲  another prompt computes the next block (held up).     │ more blocks of the prefix were sealed since.
      └────────────────────────────────────────────────────────┘

The memory server grants all blocks of a prompt at once: cached blocks of the prefix, and fresh blocks to fill. A
waiting prompt holds no blocks. Full blocks are sealed after the step that completed the blocks.

A prompt waits while its next block is computed here for another prompt, so equal prompts arriving together are computed
once. Only admitted prompts are waited for, because admitted prompts need nothing more to continue. Their turn is
earlier, or all their tokens are launched. So the waiting prompt is not delayed.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from common.kv.tables import Tables
from common.memory.client.lease_cache import Grant, LeaseCache
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
    """Chain of keys of a prompt, and the prompt's blocks until admission."""

    root: bytes = b""  # start of the chain; b"" if no block is looked up or sealed
    digests: list[bytes] = field(default_factory=list)  # digests of full blocks
    num_sealed: int = 0  # leading blocks found or sealed
    grant: Grant | None = None  # all blocks, until admission
    is_outdated: bool = False  # more blocks were sealed since the request for blocks
    is_filling: bool = False  # some granted blocks are lent, to be filled from another pool

    @property
    def next_digest(self) -> bytes:
        """Digest of the first full block not sealed yet; b"" when all are sealed."""
        return self.digests[self.num_sealed] if self.num_sealed < len(self.digests) else b""

    @property
    def last_digest(self) -> bytes:
        """Digest of the last full block, or the chain's root; b"" if no block is to be sealed."""
        return self.digests[-1] if self.digests else self.root

    @property
    def granted(self) -> list[int]:
        """Blocks of the grant, without lent blocks."""
        return [] if self.grant is None else [*self.grant.found, *self.grant.fresh]


class KnownPrompt(Prompt, Protocol):
    """A prompt whose beginning may be known."""

    beginning: Beginning
    num_scheduled_tokens: int  # computed by the steps launched so far

    @property
    def key(self) -> Key:
        """(request_id, attempt)."""

    @property
    def token_ids(self) -> Sequence[int]:
        """All tokens to be computed."""

    @property
    def num_slots(self) -> int:
        """Tokens with room in the blocks, including the first output if more outputs may follow."""

    @property
    def num_prompt_logprobs(self) -> int:
        """Above 0 if log-probabilities need the computation itself."""

    @property
    def tables(self) -> Tables:
        """Block tables; available after admission."""


AnyPrompt = TypeVar("AnyPrompt", bound=KnownPrompt)


class PromptPrefixes(Generic[AnyPrompt]):
    """Owner of blocks granted to waiting prompts.

    Args:
        tell: called with a prompt whose cached blocks were found.
        section: enables lookups and sealing, if blocks are reusable. A prompt shorter than `prefix_min_tokens` takes
            leased
            blocks, unless another prompt computes the same prefix.
        has_blocks: tells whether the given counts of blocks are leased and free.
    """

    def __init__(
        self,
        leases: LeaseCache,
        tell: Callable[[AnyPrompt], None],
        section: KVSection,
        has_blocks: Callable[[Counts], bool] | None = None,
    ) -> None:
        self.leases, self.tell, self.has_blocks = leases, tell, has_blocks or leases.fetch
        self.layout, self.min_tokens = leases.shape.layout, section.prefix_min_tokens
        self.is_on = section.prefix_cache and self.layout.is_reusable
        self.block_size = self.layout.groups[0].block_size
        self.rate = PromptRate()
        self._digests = TextDigests(self.block_size)
        self.look_elsewhere: Callable[[AnyPrompt], None] = lambda prompt: None  # called with a prompt after a grant
        self.asked: dict[Key, AnyPrompt] = {}
        self.computing: dict[bytes, AnyPrompt] = {}  # digest: prompt that will seal the block next

    @property
    def block_us(self) -> int:
        """Microseconds for computing a block."""
        return self.rate.block_us(self.block_size)

    def begin(self, prompt: AnyPrompt, salt: bytes) -> None:
        """Make the keys of a prompt, and ask for blocks unless another prompt computes some of the blocks."""
        if self.is_on:
            root = prompt.beginning.root = root_of(self.layout, salt)
            prompt.beginning.digests = self._digests.of(root, pack_ids(prompt.token_ids))
            if self._is_looked_up(prompt) and not self.is_held_up(prompt):
                self._ask(prompt)

    def lacking(self, prompt: AnyPrompt) -> list[bytes]:
        """Return digests of blocks whose presence would save computing.

        At least one token is always computed. With prompt log-probabilities, all tokens are computed.
        """
        if prompt.num_prompt_logprobs:
            return []
        beginning = prompt.beginning
        return beginning.digests[beginning.num_sealed : (len(prompt.token_ids) - 1) // self.block_size]

    def has_asked(self, message: PromptBlocks) -> bool:
        """Tell whether the message answers a prompt of this owner."""
        return (message.request_id, message.attempt) in self.asked

    def hear(self, message: PromptBlocks) -> None:
        """Take over the blocks of a prompt; free the blocks if the prompt is gone."""
        prompt, grant = self.asked.pop((message.request_id, message.attempt), None), self.leases.granted(message)
        if prompt is None:
            self.leases.free([*grant.found, *grant.fresh])
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
        """Tell whether the prompt waits for blocks or for another prompt's blocks; admitted prompts never wait."""
        if prompt.is_started:
            return False
        if prompt.key in self.asked or prompt.beginning.is_filling:
            return True
        lacking = self.lacking(prompt)
        other = self.computing.get(lacking[0]) if lacking else None
        return other is not None and (not other.num_left or turn_of(other) <= turn_of(prompt))

    def take_blocks(self, prompt: AnyPrompt, counts: Counts) -> Sequence[list[int]] | None:
        """Take all blocks of a prompt for admission, by group; None if the prompt has to wait.

        Args:
            counts: number of the prompt's blocks in each group.
        """
        grant = prompt.beginning.grant
        if grant is None and self._is_looked_up(prompt):
            self._ask(prompt)
            return None
        if not self.has_blocks(counts if grant is None else self.layout.nothing):
            return None
        blocks = self.leases.allocate(counts) if grant is None else [prompt.beginning.granted]
        prompt.beginning.grant = None
        self._compute_next(prompt)
        return blocks

    def computed(self, reached: Iterable[tuple[AnyPrompt, int]], waiting: Iterable[AnyPrompt]) -> None:
        """Seal full blocks after a step, given the tokens `reached` in each prompt, and serve waiting prompts."""
        sealed = {digest for prompt, num_tokens in reached for digest in self._seal(prompt, num_tokens)}
        if sealed:
            self.sealed(sealed, waiting)

    def sealed(self, digests: Container[bytes], waiting: Iterable[AnyPrompt]) -> None:
        """Make prompts that wait for these digests ask again, at once or after the outstanding answer."""
        for prompt in waiting:
            beginning = prompt.beginning
            if prompt.key in self.asked:
                beginning.is_outdated |= any(digest in digests for digest in beginning.digests)
            elif beginning.next_digest in digests and not beginning.is_filling:
                self._release(prompt)
                self._ask(prompt)

    def let_go(self, prompts: Iterable[AnyPrompt]) -> bool:
        """Free the grants of waiting prompts; return whether there were any. The prompts ask again at their turn."""
        keepers = [prompt for prompt in prompts if prompt.beginning.grant and not prompt.beginning.is_filling]
        for prompt in keepers:
            self._release(prompt)
        return bool(keepers)

    def forget(self, prompt: AnyPrompt) -> None:
        """Drop a completed or given-up prompt; other prompts stop waiting for the prompt's blocks."""
        if self.asked.pop(prompt.key, None) is not None:
            self.leases.unwant_prompt(prompt.key)
        self._compute_no_more(prompt)
        self._release(prompt)

    def lend(self, prompt: AnyPrompt, count: int) -> list[int]:
        """Take the first fresh blocks out of a prompt's grant; the prompt waits until their return."""
        beginning = prompt.beginning
        assert beginning.grant is not None, "its blocks are granted"
        lent = beginning.grant.fresh[:count]
        del beginning.grant.fresh[:count]
        beginning.is_filling = True
        return lent

    def return_lent(self, prompt: AnyPrompt, sealed: Sequence[int], unfilled: Sequence[int] = ()) -> None:
        """Return lent blocks, sealed or unfilled; all are freed if the prompt is gone."""
        beginning = prompt.beginning
        beginning.is_filling = False
        if beginning.grant is None:
            self.leases.free([*sealed, *unfilled])
            return
        beginning.grant.found.extend(sealed)
        beginning.grant.fresh[:0] = unfilled
        if sealed:
            self._begin_behind(prompt)

    def lose_lent(self, prompt: AnyPrompt) -> None:
        """Give up lent blocks; the prompt asks for all blocks again."""
        prompt.beginning.is_filling = False
        if prompt.beginning.grant is not None:
            self._release(prompt)
            self._ask(prompt)

    def _is_looked_up(self, prompt: AnyPrompt) -> bool:
        return self.is_on and len(prompt.token_ids) >= self.min_tokens and bool(self.lacking(prompt))

    def _ask(self, prompt: AnyPrompt) -> None:
        """Ask for all blocks of a prompt without any."""
        num_blocks = self.layout.groups[0].num_places(prompt.num_slots)
        self.asked[prompt.key] = prompt
        self.leases.want_prompt(prompt.key, self.lacking(prompt), num_blocks, prompt.priority, self.block_us)

    def _release(self, prompt: AnyPrompt) -> None:
        """Free the grant of a prompt, if any."""
        beginning = prompt.beginning
        if beginning.grant is not None:
            self.leases.free(beginning.granted)
            beginning.grant = None
            beginning.num_sealed = prompt.num_scheduled_tokens = 0

    def _begin_behind(self, prompt: AnyPrompt) -> None:
        """Set a prompt to be computed from behind its found blocks."""
        assert prompt.beginning.grant is not None, "its blocks are granted"
        prompt.beginning.num_sealed = len(prompt.beginning.grant.found)
        prompt.num_scheduled_tokens = prompt.beginning.num_sealed * self.block_size
        self.tell(prompt)

    def _seal(self, prompt: AnyPrompt, num_tokens: int) -> Sequence[bytes]:
        """Seal full blocks within the first `num_tokens`, if not sealed yet; return the new digests."""
        beginning = prompt.beginning
        begin, end = beginning.num_sealed, min(num_tokens // self.block_size, len(beginning.digests))
        if begin >= end:
            return ()
        self._compute_no_more(prompt)
        sealed = beginning.digests[begin:end]
        self.leases.seal(prompt.tables[0].block_ids[begin:end], sealed)
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
