"""Scheduler of decoding: sequences of the next step, and blocks. Torch-free.

    reserved ──activate──▶ active, in a row ──last token scheduled──▶ active, no row ──end──▶ ended
        └──unreserve──▶ free    │ ▲         └───────────────end (finish, abort, preempt)──────▶ ended.
                                ▼ └──a block, its last token known
                          active, resting
    active, in a row ──pause──▶ active, paused ──resume──▶ active, in a row.

A block table grows by a block when the next token of the sequence needs a block. A sliding window reuses blocks out of
sight. Sealed ones are freed instead, after the steps launched so far, which may still read them.

- Without a block, of any group, a sequence rests (see `slots`): the sequence leaves its row and the others go on.
- A sequence with a slow grammar rests, too, until the mask is known.
- If no blocks come free, the youngest sequence is preempted. A later replay costs work but no request.
- A paused sequence has given the row to another (see `admission`) and keeps its blocks.
- Blocks of an ended sequence return to the pool when no launched step touches the blocks.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from common.kv.blocks import Allocator
from common.kv.tables import Tables, num_slots, take_gone
from common.serving.prompts.requests import Key
from decode_worker.sequences.capacity import Capacity
from decode_worker.sequences.row_queue import RowQueue
from decode_worker.sequences.sequence import DecodeSequence
from decode_worker.sequences.slots import Slots


class Paused(NamedTuple):
    """A sequence that waits for a row again."""

    sequence: DecodeSequence


class DecodeScheduler:
    """Owner of every sequence with blocks here; for the arguments see `Capacity`."""

    def __init__(self, allocator: Allocator, max_num_seqs: int, max_len: int, step_tokens: int = 1) -> None:
        self.allocator, self.layout = allocator, allocator.shape.layout
        self.capacity = Capacity(allocator, max_num_seqs, max_len, step_tokens)
        self.slots = Slots(self.capacity)
        self.rows = self.slots.rows
        self.reserved: dict[Key, DecodeSequence] = {}  # blocks are being filled
        self.active: dict[Key, DecodeSequence] = {}  # oldest first
        self.lingering: list[DecodeSequence] = []  # ended, blocks still touched by steps in flight
        self.leaving: deque[list[int]] = deque()  # blocks to free after each step in flight, oldest first
        self.on_end: Callable[[DecodeSequence], None] = lambda sequence: None  # called before its blocks are freed
        self.paused: RowQueue[Paused] = RowQueue(self.capacity.num_rows_of.__getitem__)

    def reserve(self, sequence: DecodeSequence, brought: Tables) -> None:
        """Reserve a row for a sequence with blocks of some or all tokens but the last.

        Missing blocks are allocated; the caller has checked for free blocks.
        """
        self.capacity.grow(brought, len(sequence.token_ids))
        sequence.tables, sequence.num_slots = brought, num_slots(brought)
        self.reserved[sequence.key] = sequence
        self.capacity.count_row(sequence, 1)

    def unreserve(self, sequence: DecodeSequence) -> None:
        """Drop a reserved sequence and free its blocks; no copy may be under way."""
        del self.reserved[sequence.key]
        self.capacity.count_row(sequence, -1)
        self.capacity.free(sequence)

    def activate(self, sequence: DecodeSequence) -> None:
        """Let a reserved sequence with complete KV join the next step."""
        del self.reserved[sequence.key]
        self.active[sequence.key] = sequence
        self.rows.enter(sequence)

    def adopt(self, sequence: DecodeSequence, tables: Tables) -> None:
        """Activate a sequence with a row whose prompt was computed here, and whose next token is about to be logged."""
        sequence.tables, sequence.num_slots = tables, num_slots(tables)
        sequence.num_scheduled += 1
        self.active[sequence.key] = sequence
        self.rows.enter(sequence)
        if not sequence.wants_step:
            self.rows.leave(sequence)

    def preempt(self) -> DecodeSequence:
        """End and return the last admitted sequence of the worst priority, preferring paused sequences."""
        youngest_first = reversed(self.active.values())
        victim = max(youngest_first, key=lambda sequence: (sequence.request.priority, sequence.is_paused))
        self.end(victim)
        return victim

    def launched(self) -> list[DecodeSequence]:
        """Count a launched step over all rows; return its sequences by row."""
        sequences, leaving, is_append_only = list(self.rows.sequences), list[int](), self.layout.is_append_only
        for sequence in sequences:
            sequence.num_scheduled += 1
            sequence.num_in_flight += 1
            if not is_append_only:
                leaving += take_gone(sequence.tables)
            if not sequence.wants_step:
                self.rows.leave(sequence)
        self.leaving.append(leaving)
        return sequences

    def end(self, sequence: DecodeSequence) -> None:
        """End a finished, failed or aborted sequence; its blocks are freed once no step touches any."""
        sequence.ended = True
        self.on_end(sequence)
        del self.active[sequence.key]
        if sequence.is_paused:
            self.paused.remove(Paused(sequence))
        else:
            self.slots.leave(sequence)
            self.capacity.count_row(sequence, -1)
        if sequence.num_in_flight:
            self.lingering.append(sequence)
        else:
            self.capacity.free(sequence)

    def collected(self, sequences: list[DecodeSequence]) -> None:
        """Count a collected step; free the blocks of ended sequences without steps in flight."""
        for sequence in sequences:
            sequence.num_in_flight -= 1
        if self.leaving and (leaving := self.leaving.popleft()):
            self.allocator.free(leaving)
        for sequence in [s for s in self.lingering if not s.num_in_flight]:
            self.lingering.remove(sequence)
            self.capacity.free(sequence)
