"""Checkpoints of prompts: what later texts need, beside blocks of append-only groups, to resume within a prompt.

    windows: full blocks, sealed like those of append-only groups, if they are in sight of a stop. A sealed block is
             never written again. So it is sealed only if the prompt does not need its room, or a free block takes its
             place. All other blocks are used again for the prompt's later places.
    states:  a **snapshot**, which is another block of the group. The state is copied there behind a step.

A prompt has few **stops**, so a prompt of any length evicts few checkpoints of other texts. Stops are the last full
block before the end, the place where a text parted from this one, and the last doublings (see `stops`). The first two
end a chunk; a snapshot at a doubling is taken where a chunk ends there.

A checkpoint takes free blocks: of states those that came with the prompt's other blocks, of windows any at hand.
Without a free block there is none, because no sequence waits for a checkpoint. A sealed snapshot is let go at once, and
evicted like any cached block. So snapshots take no memory from sequences, and cost a copy of a state each.

A snapshot where texts part: Pan et al. "Marconi: Prefix Caching for the Era of Hybrid LLMs" (MLSys 2025).
"""

from bisect import bisect_right
from collections.abc import Callable
from typing import Generic, NamedTuple

from common.memory.client.lease_cache import LeaseCache
from common.serving.prompts.sequence import AnyPrompt, DueBlock
from common.serving.prompts.stops import last_doubling
from common.wire.values.kv_layout import Counts, KVLayout
from common.wire.values.pool_shape import minus
from common.wire.values.resumption import needed

MOST_WITHIN = 2
"""Most stops at doublings; shorter texts have left those before, or resume there less often."""

CUT_DIVISOR = 4
"""Divisor of a chunk's tokens; the quotient bounds what is cut off, because a snapshot is not worth another step."""


class StateCopy(NamedTuple):
    """A copy of a state, on the device."""

    source_id: int
    target_id: int


class Checkpoints(Generic[AnyPrompt]):
    """Checkpoints of a worker's prompts.

    Args:
        is_on: false takes none.
        min_tokens: no checkpoint is taken earlier in a text.
        reserve: returns free blocks to leave at hand, by group.
    """

    def __init__(self, leases: LeaseCache, *, is_on: bool, min_tokens: int, reserve: Callable[[], Counts]) -> None:
        self.leases, self.min_tokens, self.reserve = leases, min_tokens, reserve
        self.layout: KVLayout = leases.shape.layout
        self.has_windows = is_on and any(group.window for group in self.layout.groups)
        self.states = self.layout.states if is_on else []

    def num_snapshots(self, prompt: AnyPrompt) -> int:
        """Return the most snapshots that a prompt takes; the place where a text parted from it is not known yet."""
        if not self.states:
            return 0
        num_stops = len(self._doublings(prompt)) + 2
        return num_stops if self._is_worthwhile(self._last(prompt)) else 0

    def take_surplus(self, prompt: AnyPrompt) -> list[int]:
        """Take and return granted blocks for snapshots that the prompt will not take, because of the found blocks."""
        grant = prompt.beginning.grant
        assert grant is not None, "its blocks are granted"
        if not self.states:
            return []
        num_kept = 1 + sum(stop > grant.num_places for stop in self.stops(prompt))
        surplus = [block_id for number in self.states for block_id in grant.fresh[number][num_kept:]]
        for number in self.states:
            del grant.fresh[number][num_kept:]
        return surplus

    def next_stop(self, prompt: AnyPrompt, num_tokens: int) -> int:
        """Return the length of the first snapshot behind `num_tokens` that ends a chunk; 0 for none."""
        if not self._num_spare(prompt):
            return 0
        size = self.layout.block_size
        return min((size * stop for stop in self._ends(prompt) if size * stop > num_tokens), default=0)

    def next_awaited(self, prompt: AnyPrompt, num_places: int) -> int:
        """Return the next stop behind `num_places` places that others may wait for, in places; 0 for none."""
        if self.states:
            return self.next_stop(prompt, num_places * self.layout.block_size) // self.layout.block_size
        return min((stop for stop in self.stops(prompt) if stop > num_places), default=0)

    def stops(self, prompt: AnyPrompt) -> set[int]:
        """Return all stops of a prompt, in places."""
        return self._ends(prompt) | set(self._doublings(prompt))

    def num_next(self, prompt: AnyPrompt) -> int:
        """Return the most tokens of a prompt's next chunk."""
        stop = self.next_stop(prompt, prompt.num_scheduled_tokens)
        return stop - prompt.num_scheduled_tokens if stop else prompt.num_left

    def cut(self, prompt: AnyPrompt, num_tokens: int) -> int:
        """Return the tokens of a chunk of at most `num_tokens`, cut back to a doubling near its end."""
        begin, size = prompt.num_scheduled_tokens, self.layout.block_size
        if not self._takes(prompt, begin) or num_tokens == self.num_next(prompt):
            return num_tokens
        inside = (size * stop - begin for stop in self._doublings(prompt) if begin < size * stop <= begin + num_tokens)
        num_cut = max(inside, default=num_tokens)
        return num_cut if (num_tokens - num_cut) * CUT_DIVISOR <= num_tokens else num_tokens

    def prepare(self, prompt: AnyPrompt, end: int) -> list[StateCopy]:
        """Choose what is sealed once a chunk up to `end` is over; return the copies of states behind the chunk.

        Call for each chunk in order, with the tables extended to its end.
        """
        if self.has_windows:
            self._mark_windows(prompt, end)
        place, within = divmod(end, self.layout.block_size)
        if within or not self._num_spare(prompt):
            return []
        if place not in self._ends(prompt) and not (place in self._doublings(prompt) and self._takes(prompt, end)):
            return []
        states = [prompt.tables[number] for number in self.states]
        taken = [table.spare.pop() for table in states]
        prompt.beginning.due += [DueBlock(place - 1, snapshot) for snapshot in taken]
        return [StateCopy(table.block_ids[0], snapshot) for table, snapshot in zip(states, taken, strict=True)]

    @property
    def num_free(self) -> Counts:
        """Blocks at hand for checkpoints, by group; none while any sequence lacks blocks."""
        if self.leases.demand.is_lacking:
            return self.layout.nothing
        return minus(self.leases.num_free, self.reserve())

    def _last(self, prompt: AnyPrompt) -> int:
        """Return the most places that another text can have in common with a prompt; a token is always computed."""
        return min(len(prompt.beginning.digests), (len(prompt.token_ids) - 1) // self.layout.block_size)

    def _is_worthwhile(self, stop: int) -> bool:
        """Tell whether a text would be looked up that ends behind `stop` places."""
        return stop > 0 and stop * self.layout.block_size >= self.min_tokens

    def _ends(self, prompt: AnyPrompt) -> set[int]:
        """Return the stops that end a chunk, in places."""
        last = self._last(prompt)
        return set(filter(self._is_worthwhile, (min(prompt.beginning.num_alike, last), last)))

    def _doublings(self, prompt: AnyPrompt) -> list[int]:
        """Return the other stops, in places, last first."""
        stops, end = list[int](), self._last(prompt)
        while len(stops) < MOST_WITHIN and (end := last_doubling(end - 1, self.layout.block_size)):
            stops.append(end)
        return list(filter(self._is_worthwhile, stops))

    def _num_spare(self, prompt: AnyPrompt) -> int:
        """Return the number of snapshots of all states for which the prompt has blocks."""
        if not self.states:
            return 0
        if prompt.tables:
            return min(len(prompt.tables[number].spare) for number in self.states)
        grant = prompt.beginning.grant
        return 0 if grant is None else min(len(grant.fresh[number]) for number in self.states) - 1

    def _takes(self, prompt: AnyPrompt, num_tokens: int) -> bool:
        """Tell whether a snapshot at a doubling leaves blocks for the stops behind `num_tokens` that end a chunk."""
        size, num_spare = self.layout.block_size, self._num_spare(prompt)
        return num_spare > 0 and num_spare > sum(size * stop > num_tokens for stop in self._ends(prompt))

    def _mark_windows(self, prompt: AnyPrompt, end: int) -> None:
        """Choose blocks of windows to seal among those that are full at `end`: the last ones, if blocks are short."""
        beginning, size = prompt.beginning, self.layout.block_size
        begin, last = beginning.num_marked, min(end // size, len(beginning.digests))
        beginning.num_marked = max(begin, last)
        free, stops = self.num_free, self.stops(prompt)
        for number, table in enumerate(prompt.tables):
            if not table.group.window:
                continue
            full = range(max(begin, table.num_gone), last)
            seen = [needed(table.group, stop) for stop in stops]
            places = [place for place in full if any(place in of_stop for of_stop in seen)]
            lacks = table.lacks_by_sealed(end, prompt.num_slots, beginning.num_blocks[number], places)
            num_sealed = bisect_right(lacks, free[number]) - 1
            if num_fresh := lacks[num_sealed]:
                wanted = tuple(num_fresh * (each == number) for each in range(len(free)))
                table.spare += self.leases.allocate(wanted)[number]
            places = places[len(places) - num_sealed :]
            block_ids = [table.block_ids[place] for place in places]
            table.sealed.update(block_ids)
            beginning.due += map(DueBlock, places, block_ids)
