"""Which sequences decode next, with which blocks. Torch-free.

    reserved ──activate──▶ active, in a row ──last token scheduled──▶ active, no row ──end──▶ ended
        └──unreserve──▶ free    │ ▲         └───────────────end (finish, abort, preempt)──────▶ ended
                                ▼ └──a block, its last token known
                          active, resting

Block tables grow by a block when a sequence's next token needs one; a window uses again what it sees no more. When
there is none, of whichever group, it sits steps out: it leaves its row, so that the others go on, and nothing of it is
computed meanwhile. If no blocks come free either, the youngest sequence is preempted: the router replays it later,
which costs work but no request. Blocks of an ended sequence return to the pool when no launched step touches them.
"""

from collections.abc import Sequence
from functools import reduce

from common.kv.blocks import Allocator
from common.kv.tables import Tables, held_by, num_held, num_lacking, num_seen, num_slots, tables_of
from common.wire.kv_layout import Counts
from common.wire.pool_shape import are_enough, plus
from decode_worker.rows import Rows
from decode_worker.sequence import DecodeSequence, Key


class DecodeScheduler:
    """Owner of every sequence that has blocks here.

    Args:
        max_len: tokens of the longest sequence that a row of the batch has room for.
        step_tokens: most tokens at a time of a prompt that is computed here.
    """

    def __init__(self, allocator: Allocator, max_num_seqs: int, max_len: int, step_tokens: int = 1) -> None:
        self.allocator = allocator
        self.layout = allocator.shape.layout
        self.max_num_seqs = max_num_seqs
        self.step_tokens = step_tokens
        self.max_len = min(max_len, self.layout.most_tokens(allocator.capacity, step_tokens))
        self.rows = Rows()
        self.reserved: dict[Key, DecodeSequence] = {}  # blocks are being filled
        self.active: dict[Key, DecodeSequence] = {}  # oldest first
        self.resting: list[DecodeSequence] = []  # active, without a row for want of a block, longest first
        self.lingering: list[DecodeSequence] = []  # ended, blocks still touched by steps in flight

    def objection(self, sequence: DecodeSequence) -> str:
        """Why it can never be decoded here, however idle the worker is; empty when it can."""
        if sequence.max_total_tokens <= self.max_len:
            return ""
        return (
            f"prompt and max_tokens are {sequence.max_total_tokens} tokens, this decode worker takes at most "
            f"{self.max_len}; lower max_tokens or shorten the prompt"
        )

    def has_room(self, num_tokens: int) -> bool:
        """Whether a sequence may be admitted: a row, blocks for its tokens, and one for each other to grow."""
        return self.has_row() and self.has_blocks(num_seen(self.layout, num_tokens))

    def has_row(self) -> bool:
        """Whether a row is free, those counted that reserved sequences will take."""
        return self.num_taken < self.max_num_seqs

    def has_blocks(self, counts: Counts) -> bool:
        """Whether there are so many, and one for each sequence to grow."""
        return self.allocator.fetch(plus(counts, self.num_growing))

    def num_lacking_of_prompt(self, sequence: DecodeSequence, num_found: int) -> Counts:
        """Blocks to compute its prompt here, when so many of the first are there."""
        first, *others = self.layout.most_blocks(len(sequence.token_ids), self.step_tokens)
        return (first - num_found, *others)

    def reserve_prompt(self, sequence: DecodeSequence, found: Sequence[int] = ()) -> bool:
        """Admit one whose prompt is computed here, behind what was found of it, to a row to come, if there is room."""
        counts = self.num_lacking_of_prompt(sequence, len(found))
        if not self.has_row() or not self.has_blocks(counts):
            return False
        fresh = self.allocator.allocate(counts)
        fresh[0] = [*found, *fresh[0]]
        self._reserve(sequence, tables_of(self.layout, fresh))
        return True

    def reserve(self, sequence: DecodeSequence, brought: Tables) -> None:
        """Admit one that brings blocks of all tokens but the last, or some: the others it gets, which must be there."""
        num_tokens = len(sequence.token_ids)
        fresh = self.allocator.allocate(num_lacking(brought, num_tokens, num_tokens))
        for table, block_ids in zip(brought, fresh, strict=True):
            table.extend(num_tokens, num_tokens, block_ids)
        self._reserve(sequence, brought)

    def unreserve(self, sequence: DecodeSequence) -> None:
        """It will not come, and nothing copies into its blocks any more."""
        del self.reserved[sequence.key]
        self._free(sequence)

    def activate(self, sequence: DecodeSequence) -> None:
        """The KV of a reserved sequence is complete: it joins the next step."""
        del self.reserved[sequence.key]
        self.active[sequence.key] = sequence
        self.rows.enter(sequence)

    def adopt(self, sequence: DecodeSequence) -> None:
        """Activate a sequence whose prompt was computed here and whose next token is about to be logged."""
        sequence.num_scheduled += 1
        for table in sequence.tables:
            self.allocator.free(table.trim(sequence.num_scheduled))
        self.activate(sequence)
        if not sequence.wants_step:
            self.rows.leave(sequence)

    def has(self, key: Key) -> bool:
        """Whether it is active, or will be."""
        return key in self.active or key in self.reserved

    def find(self, request_id: str, attempt: int) -> list[DecodeSequence]:
        """Active attempts of a request up to `attempt`."""
        return [s for s in self.active.values() if s.request_id == request_id and s.attempt <= attempt]

    def make_slots(self) -> None:
        """See that every row has a slot for its next token; sequences without one rest until there is a block."""
        rested, self.resting = self.resting, []
        for sequence in rested:
            if not sequence.num_in_flight and self._has_slot(sequence):
                self.rows.enter(sequence)
            else:
                self.resting.append(sequence)
        lacking = [sequence for sequence in self.rows.sequences if sequence.num_scheduled > sequence.num_slots]
        for sequence in lacking:
            if not self._has_slot(sequence):
                self.rows.leave(sequence)
                self.resting.append(sequence)

    def was_late(self, sequence: DecodeSequence) -> None:
        """A step has chosen nothing for it for want of its mask: the next one tries again."""
        if not sequence.ended:
            sequence.num_scheduled -= 1
            if sequence.row < 0 and sequence not in self.resting:
                self.resting.append(sequence)

    def is_starved(self) -> bool:
        """Whether sequences have sat a step out and wait for more blocks than steps in flight will let go."""
        if not self.resting:
            return False
        waiting = (self._num_lacking(sequence) for sequence in self.resting if not sequence.num_in_flight)
        coming = (num_held(sequence.tables) for sequence in self.lingering)
        nothing = self.layout.nothing
        return not are_enough(reduce(plus, coming, nothing), reduce(plus, waiting, nothing)) and (
            self.allocator.is_exhausted()
        )

    def preempt(self) -> DecodeSequence:
        """End the sequence that was admitted last."""
        youngest = next(reversed(self.active.values()))
        self.end(youngest)
        return youngest

    def launched(self) -> list[DecodeSequence]:
        """A step over all rows is on its way; returns its sequences by row."""
        sequences = list(self.rows.sequences)
        for sequence in sequences:
            sequence.num_scheduled += 1
            sequence.num_in_flight += 1
            if not sequence.wants_step:
                self.rows.leave(sequence)
        return sequences

    def end(self, sequence: DecodeSequence) -> None:
        """Finished, failed or aborted; its blocks follow when no step touches them."""
        sequence.ended = True
        del self.active[sequence.key]
        self.rows.leave(sequence)
        if sequence in self.resting:
            self.resting.remove(sequence)
        if sequence.num_in_flight:
            self.lingering.append(sequence)
        else:
            self._free(sequence)

    def collected(self, sequences: list[DecodeSequence]) -> None:
        """A step is over: sequences that ended meanwhile may let go of their blocks."""
        for sequence in sequences:
            sequence.num_in_flight -= 1
        for sequence in [s for s in self.lingering if not s.num_in_flight]:
            self.lingering.remove(sequence)
            self._free(sequence)

    @property
    def num_owned(self) -> int:
        """Sequences that decode, or whose blocks steps in flight still touch."""
        return len(self.active) + len(self.lingering)

    def blocks(self) -> list[Sequence[int]]:
        """Block ids of every owner."""
        return [held_by(s.tables) for s in [*self.reserved.values(), *self.active.values(), *self.lingering]]

    @property
    def num_taken(self) -> int:
        """Rows that are taken, or will be."""
        return len(self.active) + len(self.reserved)

    @property
    def num_growing(self) -> Counts:
        """A block for each of them, of every group that may need one."""
        return tuple(self.num_taken if group.grows else 0 for group in self.layout.groups)

    def _has_slot(self, sequence: DecodeSequence) -> bool:
        """Whether its next token has a slot, in new blocks if it needs some."""
        if sequence.num_scheduled <= sequence.num_slots:
            return True
        lacking = self._num_lacking(sequence)
        if not self.allocator.fetch(lacking):
            return False
        num_tokens, fresh = sequence.num_scheduled, self.allocator.allocate(lacking)
        for number, (table, block_ids) in enumerate(zip(sequence.tables, fresh, strict=True)):
            for place in table.extend(num_tokens, num_tokens, block_ids):
                self.rows.grown(sequence, number, place, table.block_ids[place])
        sequence.num_slots = num_slots(sequence.tables)
        return True

    def _num_lacking(self, sequence: DecodeSequence) -> Counts:
        """Blocks without which its next token has no slot."""
        return num_lacking(sequence.tables, sequence.num_scheduled, sequence.num_scheduled)

    def _reserve(self, sequence: DecodeSequence, tables: Tables) -> None:
        sequence.tables, sequence.num_slots = tables, num_slots(tables)
        self.reserved[sequence.key] = sequence

    def _free(self, sequence: DecodeSequence) -> None:
        tables, sequence.tables = sequence.tables, ()
        self.allocator.free(held_by(tables))
