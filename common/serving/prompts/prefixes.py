"""Prompt prefixes computed before: looked up, waited for, and sealed for later prompts.

    arrived ──▶ asked ──PromptBlocks──▶ granted: all blocks; computed from behind the found blocks ──▶ admitted.
      ▲  another prompt computes the next block (held up).     │ more blocks of the prefix were sealed since.
      └────────────────────────────────────────────────────────┘

The memory server grants all blocks of a prompt at once (see `grants`). Full blocks are sealed after the step that
completed the blocks.

A prompt waits while its next block is computed here for another prompt, so equal prompts arriving together are computed
once. Only admitted prompts are waited for, because admitted prompts need nothing more to continue. Their turn is
earlier, or all their tokens are launched. So the waiting prompt is not delayed.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Generic

from common.memory.client.lease_cache import LeaseCache
from common.serving.prompts.grants import PromptGrants
from common.serving.prompts.order import turn_of
from common.serving.prompts.rate import PromptRate
from common.serving.prompts.sequence import AnyPrompt
from common.settings.memory_sections import KVSection
from common.wire.messages.memory import PromptBlocks
from common.wire.values.block_key import TextDigests, root_of
from common.wire.values.kv_layout import Counts
from common.wire.values.packing import pack_ids


class PromptPrefixes(Generic[AnyPrompt]):
    """Lookup and sealing of prefixes.

    Args:
        on_found: called with a prompt whose cached blocks were found.
        section: enables lookups and sealing, if blocks are reusable. A prompt shorter than `prefix_min_tokens` takes
            leased blocks, unless another prompt computes the same prefix.
        has_blocks: tells whether the given counts of blocks are leased and free.
    """

    def __init__(
        self,
        leases: LeaseCache,
        on_found: Callable[[AnyPrompt], None],
        section: KVSection,
        has_blocks: Callable[[Counts], bool] | None = None,
        rate: PromptRate | None = None,
    ) -> None:
        self.leases, self.has_blocks, self.rate = leases, has_blocks or leases.fetch, rate or PromptRate()
        self.layout, self.min_tokens = leases.shape.layout, section.prefix_min_tokens
        self.is_on = section.prefix_cache and self.layout.is_reusable
        self.block_size = self.layout.groups[0].block_size
        self.grants = PromptGrants(leases, on_found, self.rate)
        self.computing: dict[bytes, AnyPrompt] = {}  # digest: prompt that will seal the block next
        self.on_grant: Callable[[AnyPrompt], None] = lambda prompt: None  # called with a prompt after a grant
        self._digests = TextDigests(self.block_size)

    def begin(self, prompt: AnyPrompt) -> None:
        """Make the keys of a prompt, and ask for blocks unless another prompt computes some of the blocks."""
        if self.is_on:
            root = prompt.beginning.root = root_of(self.layout, prompt.request.salt)
            prompt.beginning.digests = self._digests.of(root, pack_ids(prompt.token_ids))
            if self._is_looked_up(prompt) and not self.is_held_up(prompt):
                self.grants.ask(prompt)

    def receive(self, message: PromptBlocks) -> None:
        """Take over the blocks of a prompt; ask again if more blocks were sealed since the question."""
        prompt = self.grants.receive(message)
        if prompt is None:
            return
        is_outdated, prompt.beginning.is_outdated = prompt.beginning.is_outdated, False
        if is_outdated and prompt.lacking(self.block_size):
            self.grants.ask_again(prompt)
        else:
            self.on_grant(prompt)

    def is_held_up(self, prompt: AnyPrompt) -> bool:
        """Tell whether the prompt waits for blocks or for another prompt's blocks; admitted prompts never wait."""
        if prompt.is_started:
            return False
        if prompt.key in self.grants.asked or prompt.beginning.is_filling:
            return True
        lacking = prompt.lacking(self.block_size)
        other = self.computing.get(lacking[0]) if lacking else None
        return other is not None and (not other.num_left or turn_of(other) <= turn_of(prompt))

    def take_blocks(self, prompt: AnyPrompt, counts: Counts) -> Sequence[list[int]] | None:
        """Take all blocks of a prompt for admission, by group; None if the prompt has to wait.

        Args:
            counts: number of the prompt's blocks in each group.
        """
        grant = prompt.beginning.grant
        if grant is None and self._is_looked_up(prompt):
            self.grants.ask(prompt)
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
            if prompt.key in self.grants.asked:
                beginning.is_outdated |= any(digest in digests for digest in beginning.digests)
            elif beginning.next_digest in digests and not beginning.is_filling:
                self.grants.ask_again(prompt)

    def forget(self, prompt: AnyPrompt) -> None:
        """Drop a completed or given-up prompt; other prompts stop waiting for the prompt's blocks."""
        self._compute_no_more(prompt)
        self.grants.forget(prompt)

    def _is_looked_up(self, prompt: AnyPrompt) -> bool:
        is_long = len(prompt.token_ids) >= self.min_tokens
        return self.is_on and is_long and bool(prompt.lacking(self.block_size))

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
