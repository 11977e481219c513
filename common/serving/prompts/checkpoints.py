"""Checkpoints of prompts: what later texts need, beside blocks of append-only groups, to resume within a prompt.

    windows: full blocks, sealed like those of append-only groups. A sealed block is never written again. So it is
             sealed only if the prompt does not need its room, or a free block takes its place.
    states:  a **snapshot**, which is another block of the group. The state is copied there behind a step. Snapshots
             are taken at the last full block before a prompt's end, and where a text parted from this one. Others
             are taken at chunk ends that are multiples of `INTERVAL_TOKENS`. So chunks end there.

A checkpoint takes free blocks: of states one that came with the prompt's other blocks, else any at hand. No sequence
waits for a checkpoint. Without a free block there is none. A sealed snapshot is let go at once, and evicted like any
cached block. So snapshots take memory only until others ask for it, and cost a copy of a state each.

A snapshot where texts part: Pan et al. "Marconi: Prefix Caching for the Era of Hybrid LLMs" (MLSys 2025).
"""

from bisect import bisect_right
from collections.abc import Callable
from itertools import chain
from typing import Generic, NamedTuple

from common.memory.client.lease_cache import LeaseCache
from common.serving.prompts.sequence import AnyPrompt, Due
from common.wire.values.fields import MAX_INT32
from common.wire.values.kv_layout import Counts, KVLayout
from common.wire.values.pool_shape import are_enough, minus

INTERVAL_TOKENS = 1024
"""Distance of snapshots within a long prompt.

A snapshot of Qwen3.5-4B has 51.5 MB, as much as the KV of 1,572 tokens.
"""
AT_HAND = 8
"""Free blocks kept at hand for snapshots, at most."""
AT_HAND_SHARE = 16
"""Divisor of a pool's blocks for states; the quotient bounds the blocks kept at hand."""


class StateCopy(NamedTuple):
    """A copy of a state, on the device."""

    source_id: int
    target_id: int


class Checkpoints(Generic[AnyPrompt]):
    """Checkpoints of a worker's prompts.

    Args:
        is_on: false takes none.
        min_tokens: no snapshot is taken earlier in a text.
        reserve: returns free blocks to leave at hand, by group.

    Attributes:
        step_tokens: most tokens of a chunk.
    """

    def __init__(self, leases: LeaseCache, *, is_on: bool, min_tokens: int, reserve: Callable[[], Counts]) -> None:
        self.leases, self.min_tokens, self.reserve = leases, min_tokens, reserve
        self.layout: KVLayout = leases.shape.layout
        self.has_windows = is_on and any(group.window for group in self.layout.groups)
        self.states = self.layout.states if is_on else []
        self.step_tokens = MAX_INT32
        self._one_each = tuple(int(number in self.states) for number in range(len(self.layout.groups)))

    @property
    def level(self) -> Counts:
        """Blocks to have at hand for snapshots, by group."""
        return tuple(
            min(AT_HAND, max(1, count // AT_HAND_SHARE)) if number in self.states else 0
            for number, count in enumerate(self.leases.shape.shares)
        )

    def next_stop(self, prompt: AnyPrompt, num_tokens: int) -> int:
        """Return the first planned length of a snapshot behind `num_tokens`; 0 for none. It ends a full block."""
        beginning, size = prompt.beginning, self.layout.block_size
        last = self._last(prompt)
        stops = (min(places, last) * size for places in (beginning.num_alike, last)) if self.states else ()
        return min((stop for stop in stops if stop > num_tokens and stop >= self.min_tokens), default=0)

    def num_next(self, prompt: AnyPrompt) -> int:
        """Return the most tokens of a prompt's next chunk."""
        if not self._has_room(prompt):
            return prompt.num_left
        stop = self.next_stop(prompt, prompt.num_scheduled_tokens)
        return stop - prompt.num_scheduled_tokens if stop else prompt.num_left

    def cut(self, prompt: AnyPrompt, num_tokens: int) -> int:
        """Return the tokens of a chunk of at most `num_tokens`, cut back to a multiple of the interval if inside."""
        begin = prompt.num_scheduled_tokens
        end = begin + num_tokens
        if not self._has_room(prompt) or num_tokens == self.num_next(prompt):
            return num_tokens
        rounded = end // INTERVAL_TOKENS * INTERVAL_TOKENS
        return rounded - begin if rounded > begin else num_tokens

    def prepare(self, prompt: AnyPrompt, end: int) -> list[StateCopy]:
        """Choose what is sealed once a chunk up to `end` is over; return the copies of states behind the chunk.

        Call for each chunk in order, with the tables extended to its end.
        """
        if self.has_windows:
            self._mark_windows(prompt, end)
        size = self.layout.block_size
        place = end // size - 1
        is_planned = end == self.next_stop(prompt, prompt.num_scheduled_tokens) or not end % INTERVAL_TOKENS
        is_useful = is_planned and self.min_tokens <= end and place < self._last(prompt)
        if end % size or not is_useful or not self._has_room(prompt):
            return []
        states = [prompt.tables[number] for number in self.states]
        if all(table.spare for table in states):
            taken = [table.spare.pop() for table in states]
        else:
            taken = list(chain.from_iterable(self.leases.allocate(self._one_each)))
        prompt.beginning.due += [Due(place, snapshot) for snapshot in taken]
        return [StateCopy(table.block_ids[0], snapshot) for table, snapshot in zip(states, taken, strict=True)]

    def _last(self, prompt: AnyPrompt) -> int:
        """Return the most places that another text can have in common with a prompt; a token is always computed."""
        return min(len(prompt.beginning.digests), (len(prompt.token_ids) - 1) // self.layout.block_size)

    @property
    def num_free(self) -> Counts:
        """Blocks at hand for checkpoints, by group; none while any sequence lacks blocks."""
        if self.leases.demand.is_lacking:
            return self.layout.nothing
        return minus(self.leases.num_free, self.reserve())

    def _has_room(self, prompt: AnyPrompt) -> bool:
        """Tell whether there are states, and a free block for a snapshot of each."""
        if not self.states:
            return False
        grant = prompt.beginning.grant
        has_own = bool(prompt.tables) and all(prompt.tables[number].spare for number in self.states)
        is_granted = grant is not None and all(len(grant.fresh[number]) > 1 for number in self.states)
        return has_own or is_granted or are_enough(self.num_free, self._one_each)

    def _mark_windows(self, prompt: AnyPrompt, end: int) -> None:
        """Choose blocks of windows to seal among those that are full at `end`: the last ones, if blocks are short."""
        beginning, size = prompt.beginning, self.layout.block_size
        begin, last = beginning.num_marked, min(end // size, len(beginning.digests))
        beginning.num_marked = max(begin, last)
        counts = self.layout.most_blocks(prompt.num_slots, self.step_tokens)
        free = self.num_free
        for number, table in enumerate(prompt.tables):
            if not table.group.window:
                continue
            places, most_blocks = list(range(max(begin, table.num_gone), last)), counts[number]
            lacks = table.lacks_by_sealed(end, prompt.num_slots, most_blocks, places)
            num_sealed = bisect_right(lacks, free[number]) - 1
            if num_fresh := lacks[num_sealed]:
                wanted = tuple(num_fresh * (each == number) for each in range(len(counts)))
                table.spare += self.leases.allocate(wanted)[number]
            places = places[len(places) - num_sealed :]
            block_ids = [table.block_ids[place] for place in places]
            table.sealed.update(block_ids)
            beginning.due += map(Due, places, block_ids)
