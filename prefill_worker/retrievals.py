"""What our pool lacks of a prompt, taken from a decode worker's where that is faster than computing it: replies.

    asked ──PromptBlocks──▶ pulled into blocks of the prompt ──arrived, sealed──▶ found
      └──nothing, too little, late, lost──┴──────────────────────────────────▶ computed

The prompt waits meanwhile, and no longer than for so long as it may take; so do others that lack the same. What was
pulled counts if the connection to its memory server stands when the pull is over.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from common.device.steps.loop_trace import UNTRACED, Trace
from common.kv.copies import Copies
from common.kv.pool import KVPool
from common.memory.base.reply_worth import copying_us, is_worth_taking
from common.memory.client.magazine import Magazine
from common.serving.prompts.inquiry import Key
from common.serving.prompts.prefixes import PromptPrefixes
from common.serving.prompts.rate import PromptRate
from common.serving.worker.peer_servers import Visit
from common.wire.messages.memory import PromptBlocks
from common.wire.values.packing import unpack_ids
from common.wire.values.step_counts import PullMeter
from prefill_worker.reply_pools import Holder, Holders
from prefill_worker.sequence import PromptSequence

WAIT_S = 0.5
"""Longest that a prompt waits beside twice the time that the copy should take: for an answer, which takes about a
millisecond, unless a server hangs."""
MAX_AT_ONCE = 16
FIRST_OVERHEAD_US = 1000.0
"""Of a retrieval, beside the copy itself, while none is known."""
REMEMBERED = 16
"""Retrievals by which that is known."""


class Worth:
    """Whether blocks are here sooner by a retrieval than computed, by how long the last ones of either took."""

    def __init__(self, rate: PromptRate, block_size: int, block_bytes: int) -> None:
        self.rate, self.block_size, self.block_bytes = rate, block_size, block_bytes
        self._overheads_us: deque[float] = deque([FIRST_OVERHEAD_US], maxlen=REMEMBERED)

    @property
    def taking_us(self) -> float:
        """What a retrieval takes beside the copy."""
        return median(self._overheads_us)

    def is_worth(self, num_blocks: int, gb_per_s: float) -> bool:
        """Whether so many are."""
        computing_us = self.rate.block_us(self.block_size)
        return is_worth_taking(num_blocks, self.block_bytes, gb_per_s, computing_us, self.taking_us)

    def note(self, num_blocks: int, gb_per_s: float, took_s: float) -> None:
        """So many took so long."""
        self._overheads_us.append(max(0.0, took_s - self.copy_s(num_blocks, gb_per_s)) * 1e6)

    def copy_s(self, num_blocks: int, gb_per_s: float) -> float:
        """How long so many are on their way."""
        return copying_us(num_blocks, self.block_bytes, gb_per_s) * 1e-6


@dataclass(slots=True, eq=False)
class Retrieval:
    """Blocks of a text on their way here."""

    key: Key  # of the prompt for which it was begun
    digests: Sequence[bytes]  # of what is lacking
    visit: Visit
    gb_per_s: float
    begin_s: float
    prompts: list[PromptSequence]  # that wait for it; the first has lent the blocks
    target_ids: list[int]  # blocks here
    found: PromptBlocks | None = None
    copies: Copies = field(default_factory=Copies)

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for it."""
        return not all(prompt.ended for prompt in self.prompts)


class Retrievals:
    """Owner of blocks that are being filled from another pool.

    Args:
        magazine, pool: ours.
        prefixes: told of what has arrived.
    """

    def __init__(
        self,
        magazine: Magazine,
        pool: KVPool,
        holders: Holders,
        prefixes: PromptPrefixes[PromptSequence],
        worth: Worth,
        *,
        trace: Trace = UNTRACED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.trace = trace
        self.magazine, self.pool, self.holders, self.prefixes, self.worth = magazine, pool, holders, prefixes, worth
        self._clock = clock
        self.under_way: list[Retrieval] = []
        self.late: list[Retrieval] = []  # nobody waits for them; copies into their blocks may be under way
        self.silent: set[Visit] = set()  # memory servers that owe an answer for too long
        self.num_pulled, self.meter = 0, PullMeter()  # blocks, since the start, and the copies
        prefixes.look_elsewhere = self.begin

    @property
    def is_busy(self) -> bool:
        """Whether an answer or the end of a copy may come soon."""
        return bool(self.under_way or self.late or self.holders.is_proving)

    def begin(self, prompt: PromptSequence) -> None:
        """Take what is lacking of a prompt, whose blocks are granted, from where it may be, if it pays."""
        named, prompt.holder = prompt.holder, None
        digests = self.prefixes.lacking(prompt)
        if named is None or not digests or self.prefixes.is_held_up(prompt):
            return
        if (other := next((each for each in self.under_way if each.digests[0] == digests[0]), None)) is not None:
            self.prefixes.lend(prompt, 0)
            other.prompts.append(prompt)
            return
        holder = self.holders.find(*named)
        if holder is None or not self._may_have(holder, len(digests)):
            return
        assert holder.visit is not None, "who is found is visited"
        target_ids = self.prefixes.lend(prompt, len(digests))
        begun = Retrieval(prompt.key, digests, holder.visit, holder.gb_per_s, self._clock(), [prompt], target_ids)
        self.under_way.append(begun)
        begun.visit.guest.look_up(*begun.key, digests)

    def tend(self) -> None:
        """Go on with all of them, and with what is lost with a memory server; call once a turn."""
        for visit, said in self.holders.visits.receive():
            if isinstance(said, PromptBlocks):
                self._hear(visit, said)
        for visit in self.holders.visits.tend(self._uses):
            self.silent.discard(visit)
            self.holders.lose(visit)
        self.holders.tend()
        for each in list(self.under_way):
            self._go_on(each)
        for each in [each for each in self.late if each.copies.over()]:
            self.late.remove(each)
            self.magazine.free(each.target_ids)
            self._free_found(each)

    def blocks(self) -> Iterator[list[int]]:
        """Block ids of every one."""
        return (each.target_ids for each in [*self.under_way, *self.late])

    def _may_have(self, holder: Holder, num_blocks: int) -> bool:
        is_free = len(self.under_way) + len(self.late) < MAX_AT_ONCE
        is_heard = holder.visit not in self.silent and holder.visit is not None and not holder.visit.problem
        return is_free and is_heard and self.worth.is_worth(num_blocks, holder.gb_per_s)

    def _hear(self, visit: Visit, found: PromptBlocks) -> None:
        self.silent.discard(visit)
        key, num_found = (found.request_id, found.attempt), len(unpack_ids(found.block_ids))
        each = next((each for each in self.under_way if each.key == key and each.visit is visit), None)
        is_awaited = each is not None and each.found is None
        if each is not None and is_awaited and num_found and self._is_of_use(each, num_found):
            self._pull(each, found, num_found)
            return
        if num_found:
            visit.guest.free(found)
        if each is not None and is_awaited:
            self._end(each)

    def _is_of_use(self, each: Retrieval, num_found: int) -> bool:
        is_answer = num_found <= len(each.digests) and not each.visit.problem
        return is_answer and each.is_wanted and self.worth.is_worth(num_found, each.gb_per_s)

    def _pull(self, each: Retrieval, found: PromptBlocks, num_found: int) -> None:
        each.found = found
        assert each.visit.pool is not None, "what is proven is mapped"
        each.copies.start(each.visit.pool, unpack_ids(found.block_ids), self.pool, each.target_ids[:num_found])

    def _go_on(self, each: Retrieval) -> None:
        if each.found is not None and each.copies.over():
            each.visit.guest.look()
            if each.copies.problem or each.visit.problem:
                self._end(each)
            else:
                self._arrive(each)
        elif self._is_late(each) or each.visit.problem:
            if each.found is None:
                self.silent.add(each.visit)
            self._end(each)

    def _is_late(self, each: Retrieval) -> bool:
        copy_s = self.worth.copy_s(len(each.digests), each.gb_per_s)
        return self._clock() - each.begin_s > WAIT_S + 2 * copy_s

    def _arrive(self, each: Retrieval) -> None:
        """Others find it from now on, and the prompt has it."""
        assert each.found is not None, "it was pulled"
        num_found = len(unpack_ids(each.found.block_ids))
        sealed, unfilled = each.target_ids[:num_found], each.target_ids[num_found:]
        self.worth.note(num_found, each.gb_per_s, self._clock() - each.begin_s)
        self.meter.note(each.copies.num_pulls, each.copies.num_bytes, each.copies.seconds)
        self.num_pulled += num_found
        each.visit.guest.free(each.found)
        digests = each.digests[:num_found]
        self.magazine.seal(sealed, digests)
        first, *others = self._leave(each)
        self.prefixes.return_lent(first, sealed, unfilled)
        for prompt in others:
            self.prefixes.return_lent(prompt, [])
        self.prefixes.sealed(set(digests), [prompt for prompt in others if not prompt.ended])

    def _end(self, each: Retrieval) -> None:
        """Nothing comes of it: what waits for it is computed, in other blocks if a copy may still write these."""
        first, *others = self._leave(each)
        if each.copies.over():
            self.prefixes.return_lent(first, [], each.target_ids)
            self._free_found(each)
        else:
            self.late.append(each)
            self.prefixes.lose_lent(first)
        for prompt in others:
            self.prefixes.return_lent(prompt, [])

    def _leave(self, each: Retrieval) -> list[PromptSequence]:
        """Return those that waited for it."""
        self.under_way.remove(each)
        for prompt in each.prompts:
            self.trace.stretch("pull", prompt.key, max(each.begin_s, prompt.arrived_s), self._clock())
        return each.prompts

    def _free_found(self, each: Retrieval) -> None:
        if each.found is not None:
            each.visit.guest.free(each.found)

    def _uses(self, visit: Visit) -> bool:
        return any(each.visit is visit for each in [*self.under_way, *self.late])
