"""Scheduler of decoding: sequences of the next step, and blocks. Torch-free.

    reserved ──activate──▶ active, in a row ──last token scheduled──▶ active, no row ──end──▶ ended
        └──unreserve──▶ free    │ ▲         └───────────────end (finish, abort, preempt)──────▶ ended.
                                ▼ └──a block, its last token known
                          active, resting
    active, in a row ──pause──▶ active, paused ──resume──▶ active, in a row.

A block table grows by a block when the next token of the sequence needs a block. A sliding window reuses blocks out of
sight.

- Without a block, of any group, a sequence rests: the sequence leaves its row and the others go on.
- A sequence with a slow grammar rests, too, until the mask is known.
- If no blocks come free, the youngest sequence is preempted. A later replay costs work but no request.
- A paused sequence has given the row to another (see `admission`) and keeps its blocks.
- Blocks of an ended sequence return to the pool when no launched step touches the blocks.
"""

from collections import Counter
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

from common.kv.blocks import Allocator
from common.kv.tables import Tables, held_by, num_held, num_lacking, num_seen, num_slots, tables_of
from common.wire.values.kv_layout import Counts
from common.wire.values.pool_shape import are_enough, plus
from decode_worker.sequences.row_queue import Group, RowQueue, group_of
from decode_worker.sequences.rows import Rows
from decode_worker.sequences.sequence import DecodeSequence, Key


class Paused(NamedTuple):
    """A sequence that waits for a row again."""

    sequence: DecodeSequence


class DecodeScheduler:
    """Owner of every sequence with blocks here.

    Args:
        max_len: tokens of the longest sequence that fits a row of the batch.
        step_tokens: most tokens of a prompt chunk computed here.
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
        self.resting: list[DecodeSequence] = []  # active, no row for want of a block or mask, longest first
        self.lingering: list[DecodeSequence] = []  # ended, blocks still touched by steps in flight
        self.num_rows: Counter[Group] = Counter()  # rows taken, or promised to reserved sequences
        self.num_rows_of: Counter[int] = Counter()  # rows taken or promised, by client
        self.paused: RowQueue[Paused] = RowQueue(self.num_rows_of.__getitem__)

    def objection(self, sequence: DecodeSequence) -> str:
        """Return why a sequence can never be decoded here, even by an idle worker; empty if decoding is possible."""
        if sequence.max_total_tokens <= self.max_len:
            return ""
        return (
            f"prompt and max_tokens are {sequence.max_total_tokens} tokens, this decode worker takes at most "
            f"{self.max_len}; lower max_tokens or shorten the prompt"
        )

    def has_room(self, num_tokens: int) -> bool:
        """Tell whether a row is free, and blocks for a new sequence and for each other sequence to grow."""
        return self.has_row() and self.has_blocks(num_seen(self.layout, num_tokens))

    def has_row(self, but: int = 0) -> bool:
        """Tell whether a row is free beside `but` others; rows of reserved sequences are taken."""
        return self.num_taken + but < self.max_num_seqs

    def has_blocks(self, counts: Counts) -> bool:
        """Tell whether `counts` blocks are leased and free, and one more for each sequence to grow."""
        return self.allocator.fetch(plus(counts, self.num_growing))

    def num_blocks_of_prompt(self, sequence: DecodeSequence) -> Counts:
        """Return the blocks needed to compute a prompt here and to begin decoding."""
        return self.layout.most_blocks(sequence.num_prompt_slots, self.step_tokens)

    def reserve_prompt(self, sequence: DecodeSequence, blocks: Sequence[Sequence[int]]) -> None:
        """Reserve a free row for a sequence whose prompt is computed here, in `blocks` by group."""
        self._reserve(sequence, tables_of(self.layout, blocks))

    def reserve(self, sequence: DecodeSequence, brought: Tables) -> None:
        """Reserve a row for a sequence with blocks of some or all tokens but the last.

        Missing blocks are allocated; the caller has checked for free blocks.
        """
        num_tokens = len(sequence.token_ids)
        fresh = self.allocator.allocate(num_lacking(brought, num_tokens, num_tokens))
        for table, block_ids in zip(brought, fresh, strict=True):
            table.extend(num_tokens, num_tokens, block_ids)
        self._reserve(sequence, brought)

    def unreserve(self, sequence: DecodeSequence) -> None:
        """Drop a reserved sequence and free its blocks; no copy may be under way."""
        del self.reserved[sequence.key]
        self._count_row(sequence, -1)
        self._free(sequence)

    def activate(self, sequence: DecodeSequence) -> None:
        """Let a reserved sequence with complete KV join the next step."""
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
        """Tell whether a sequence is active or reserved."""
        return key in self.active or key in self.reserved

    def find(self, request_id: str, attempt: int) -> list[DecodeSequence]:
        """Return active attempts of a request up to `attempt`."""
        return [s for s in self.active.values() if s.request_id == request_id and s.attempt <= attempt]

    def make_slots(self) -> None:
        """Give every row a slot for its next token; rows without a block, or with a slow grammar, rest."""
        rested, self.resting = self.resting, []
        for sequence in rested:
            if not sequence.num_in_flight and not sequence.sits_out and self._has_slot(sequence):
                self.rows.enter(sequence)
            else:
                self.resting.append(sequence)
        rows = self.rows.sequences
        for sequence in [row for row in rows if row.num_scheduled > row.num_slots or row.sits_out]:
            if sequence.sits_out or not self._has_slot(sequence):
                self.rows.leave(sequence)
                self.resting.append(sequence)

    def was_late(self, sequence: DecodeSequence) -> None:
        """Count a step without a token because the mask was late; a later step tries again."""
        if not sequence.ended:
            sequence.num_late += 1
            sequence.num_scheduled -= 1
            if sequence.row < 0 and sequence not in self.resting and not sequence.is_paused:
                self.resting.append(sequence)

    def is_starved(self) -> bool:
        """Tell whether resting sequences need more blocks than steps in flight will free."""
        if not self.resting:
            return False
        unready = (sequence for sequence in self.resting if not sequence.num_in_flight and not sequence.sits_out)
        waiting = map(self._num_lacking, unready)
        coming = (num_held(sequence.tables) for sequence in self.lingering)
        nothing = self.layout.nothing
        return not are_enough(reduce(plus, coming, nothing), reduce(plus, waiting, nothing)) and (
            self.allocator.is_exhausted()
        )

    def preempt(self) -> DecodeSequence:
        """End and return the last admitted sequence of the worst priority, preferring paused sequences."""
        youngest_first = reversed(self.active.values())
        victim = max(youngest_first, key=lambda sequence: (sequence.priority, sequence.is_paused))
        self.end(victim)
        return victim

    def pause(self, group: Group) -> bool:
        """Take the row, or the promised row, of a group's last admitted sequence; false if no sequence has a row."""
        with_row = (s for s in reversed(self.active.values()) if s.row >= 0 or s in self.resting)
        victim = next((sequence for sequence in with_row if group_of(sequence) == group), None)
        if victim is None:
            return False
        self.rows.leave(victim)
        if victim in self.resting:
            self.resting.remove(victim)
        victim.is_paused, victim.place = True, -1
        self._count_row(victim, -1)
        self.paused.add(Paused(victim))
        return True

    def can_resume_next(self) -> bool:
        """Tell whether the next paused sequence may have a row, because its last token is known."""
        paused = self.paused.first()
        return paused is not None and not paused.sequence.num_in_flight

    def resume_next(self) -> DecodeSequence | None:
        """Give the next paused sequence a row, if free; without a block the sequence rests first."""
        paused = self.paused.first()
        if paused is None or not self.has_row() or not self.can_resume_next():
            return None
        sequence = paused.sequence
        self.paused.remove(paused)
        sequence.is_paused = False
        self._count_row(sequence, 1)
        if not sequence.sits_out and self._has_slot(sequence):
            self.rows.enter(sequence)
        else:
            self.resting.append(sequence)
        return sequence

    def launched(self) -> list[DecodeSequence]:
        """Count a launched step over all rows; return its sequences by row."""
        sequences = list(self.rows.sequences)
        for sequence in sequences:
            sequence.num_scheduled += 1
            sequence.num_in_flight += 1
            if not sequence.wants_step:
                self.rows.leave(sequence)
        return sequences

    def end(self, sequence: DecodeSequence) -> None:
        """End a finished, failed or aborted sequence; its blocks are freed once no step touches any."""
        sequence.ended = True
        del self.active[sequence.key]
        if sequence.is_paused:
            self.paused.remove(Paused(sequence))
        else:
            self.rows.leave(sequence)
            self._count_row(sequence, -1)
        if sequence in self.resting:
            self.resting.remove(sequence)
        if sequence.num_in_flight:
            self.lingering.append(sequence)
        else:
            self._free(sequence)

    def collected(self, sequences: list[DecodeSequence]) -> None:
        """Count a collected step; free the blocks of ended sequences without steps in flight."""
        for sequence in sequences:
            sequence.num_in_flight -= 1
        for sequence in [s for s in self.lingering if not s.num_in_flight]:
            self.lingering.remove(sequence)
            self._free(sequence)

    @property
    def num_owned(self) -> int:
        """Number of sequences that decode, or have blocks touched by steps in flight."""
        return len(self.active) + len(self.lingering)

    def blocks(self) -> list[Sequence[int]]:
        """Return the block ids of every owner."""
        return [held_by(s.tables) for s in [*self.reserved.values(), *self.active.values(), *self.lingering]]

    @property
    def num_taken(self) -> int:
        """Number of rows taken or reserved."""
        return len(self.active) + len(self.reserved) - len(self.paused)

    @property
    def num_growing(self) -> Counts:
        """A block for each taken row, in every group that may grow."""
        return tuple(self.num_taken if group.grows else 0 for group in self.layout.groups)

    def _has_slot(self, sequence: DecodeSequence) -> bool:
        """Tell whether the next token has a slot; allocates blocks if needed and free."""
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
        """Return the blocks missing for a slot of the next token."""
        return num_lacking(sequence.tables, sequence.num_scheduled, sequence.num_scheduled)

    def _reserve(self, sequence: DecodeSequence, tables: Tables) -> None:
        sequence.tables, sequence.num_slots = tables, num_slots(tables)
        self.reserved[sequence.key] = sequence
        self._count_row(sequence, 1)

    def _count_row(self, sequence: DecodeSequence, count: int) -> None:
        group, client = group_of(sequence), sequence.client
        self.num_rows[group] += count
        self.num_rows_of[client] += count
        if not self.num_rows[group]:
            del self.num_rows[group]
        if not self.num_rows_of[client]:
            del self.num_rows_of[client]

    def _free(self, sequence: DecodeSequence) -> None:
        tables, sequence.tables = sequence.tables, ()
        self.allocator.free(held_by(tables))
