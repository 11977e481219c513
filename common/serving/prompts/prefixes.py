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
from itertools import chain
from typing import Generic

from common.kv.tables import Tables, tables_behind, tables_of
from common.memory.client.lease_cache import LeaseCache
from common.serving.prompts.checkpoints import Checkpoints
from common.serving.prompts.grants import PromptGrants
from common.serving.prompts.order import turn_of
from common.serving.prompts.rate import PromptRate
from common.serving.prompts.sequence import AnyPrompt
from common.settings.memory_sections import KVSection
from common.wire.messages.memory import PromptBlocks
from common.wire.values.block_key import TextDigests, root_of
from common.wire.values.kv_layout import Counts
from common.wire.values.packing import pack_ids
from common.wire.values.pool_shape import are_enough


class PromptPrefixes(Generic[AnyPrompt]):
    """Lookup and sealing of prefixes.

    Args:
        on_found: called with a prompt whose cached blocks were found.
        section: enables lookups and sealing, if blocks are reusable. A prompt shorter than `prefix_min_tokens` takes
            leased blocks, unless another prompt computes the same prefix.
        has_blocks: tells whether the given counts of blocks are leased and free.
        reserve: returns free blocks that checkpoints leave at hand.
    """

    def __init__(
        self,
        leases: LeaseCache,
        on_found: Callable[[AnyPrompt], None],
        section: KVSection,
        has_blocks: Callable[[Counts], bool] | None = None,
        rate: PromptRate | None = None,
        reserve: Callable[[], Counts] | None = None,
    ) -> None:
        self.leases, self.has_blocks, self.rate = leases, has_blocks or leases.fetch, rate or PromptRate()
        self.layout, self.min_tokens = leases.shape.layout, section.prefix_min_tokens
        self.is_on = section.prefix_cache and self.layout.is_reusable
        self.block_size = self.layout.block_size
        reserve = reserve or (lambda: self.layout.nothing)
        self.checkpoints: Checkpoints[AnyPrompt] = Checkpoints(
            leases, is_on=self.is_on, min_tokens=self.min_tokens, reserve=reserve
        )
        self.grants = PromptGrants(leases, on_found, self.rate, self.checkpoints.num_snapshots)
        self.computing: dict[bytes, AnyPrompt] = {}  # digest: prompt that can be resumed there next
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
            self.leases.free(self.checkpoints.take_surplus(prompt))
            self.on_grant(prompt)

    def is_held_up(self, prompt: AnyPrompt) -> bool:
        """Tell whether the prompt waits for blocks or for another prompt's blocks; admitted prompts never wait."""
        if prompt.is_started:
            return False
        if prompt.key in self.grants.asked or prompt.beginning.is_filling:
            return True
        return self._awaited(prompt) is not None

    def lacks_blocks(self, prompt: AnyPrompt) -> bool:
        """Tell whether a prompt waits for blocks, or for the filling of some."""
        beginning = prompt.beginning
        if prompt.is_started or beginning.grant is not None:
            return beginning.is_filling
        if prompt.key in self.grants.asked:
            return True
        return not (self._is_looked_up(prompt) or are_enough(self.leases.num_free, beginning.num_blocks))

    def take_blocks(self, prompt: AnyPrompt) -> Tables | None:
        """Take all blocks of a prompt for admission; None if the prompt has to wait."""
        grant, counts = prompt.beginning.grant, prompt.beginning.num_blocks
        if grant is None and self._is_looked_up(prompt):
            self.grants.ask(prompt)
            return None
        if not self.has_blocks(counts if grant is None else self.layout.nothing):
            return None
        if grant is None:
            tables = tables_of(self.layout, self.leases.allocate(counts))
        else:
            tables = tables_behind(self.layout, prompt.num_slots, grant.num_places, grant.found, grant.fresh)
            prompt.beginning.snapshots = [block_id for number in self.layout.states for block_id in grant.found[number]]
        self._compute_next(prompt)
        prompt.beginning.grant = None
        return tables

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
            elif self._is_helped(prompt, digests) and not beginning.is_filling:
                self.grants.ask_again(prompt)

    def forget(self, prompt: AnyPrompt) -> None:
        """Drop a completed or given-up prompt; other prompts stop waiting for the prompt's blocks."""
        self._compute_no_more(prompt)
        self.grants.forget(prompt)

    def _is_looked_up(self, prompt: AnyPrompt) -> bool:
        is_long = len(prompt.token_ids) >= self.min_tokens
        return self.is_on and is_long and bool(prompt.lacking(self.block_size))

    def _seal(self, prompt: AnyPrompt, num_tokens: int) -> Sequence[bytes]:
        """Seal what is full or due within the first `num_tokens`; return the digests at which others can resume now."""
        beginning = prompt.beginning
        begin, end = beginning.num_sealed, min(num_tokens // self.block_size, len(beginning.digests))
        if begin >= end:
            return ()
        self._compute_no_more(prompt)
        due = [each for each in beginning.due if each.place < end]
        beginning.due = [each for each in beginning.due if each.place >= end]
        lasting = [table.block_ids[begin:end] for table in prompt.tables if table.group.is_append_only]
        block_ids = [*chain.from_iterable(lasting), *(each.block_id for each in due)]
        digests = [*beginning.digests[begin:end] * len(lasting), *(beginning.digests[each.place] for each in due)]
        if block_ids:
            self.leases.seal(block_ids, digests)
        beginning.num_sealed = end
        self._compute_next(prompt)
        if self.layout.is_append_only:
            return beginning.digests[begin:end]
        if not self.layout.states:
            return [beginning.digests[stop - 1] for stop in self.checkpoints.stops(prompt) if begin < stop <= end]
        snapshots = [each for each in due if self.leases.shape.group_of(each.block_id) in self.layout.states]
        self.leases.free([each.block_id for each in snapshots])
        return [beginning.digests[each.place] for each in snapshots]

    def _awaited(self, prompt: AnyPrompt) -> AnyPrompt | None:
        """Return another prompt that will soon have computed some of what the prompt lacks."""

        def is_sooner(other: AnyPrompt) -> bool:
            return not other.num_left or turn_of(other) <= turn_of(prompt)

        lacking, num_sealed = prompt.lacking(self.block_size), prompt.beginning.num_sealed
        if self.layout.is_append_only:
            other = self.computing.get(lacking[0]) if lacking else None
            return other if other is not None and is_sooner(other) else None
        stops = ((digest, other, other.beginning.stop - num_sealed) for digest, other in self.computing.items())
        fits = (other for digest, other, n in stops if 0 < n <= len(lacking) and lacking[n - 1] == digest)
        return next(filter(is_sooner, fits), None)

    def _is_helped(self, prompt: AnyPrompt, digests: Container[bytes]) -> bool:
        """Tell whether a prompt gets on by blocks that were just sealed with these digests."""
        if self.layout.is_append_only:
            return prompt.beginning.next_digest in digests
        return any(digest in digests for digest in prompt.lacking(self.block_size))

    def _compute_next(self, prompt: AnyPrompt) -> None:
        beginning = prompt.beginning
        if self.layout.is_append_only:
            beginning.stop = beginning.num_sealed + 1 if beginning.next_digest else 0
        else:
            beginning.stop = self.checkpoints.next_awaited(prompt, beginning.num_sealed)
        if beginning.stop:
            self.computing.setdefault(beginning.digests[beginning.stop - 1], prompt)

    def _compute_no_more(self, prompt: AnyPrompt) -> None:
        stop = prompt.beginning.stop
        digest = prompt.beginning.digests[stop - 1] if stop else b""
        if self.computing.get(digest) is prompt:
            del self.computing[digest]
