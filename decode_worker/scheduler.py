"""Which sequences decode next, with which blocks. Torch-free.

    reserved ──activate──▶ active, in a row ──last token scheduled──▶ active, no row ──end──▶ ended
        └──unreserve──▶ free    │ ▲         └───────────────end (finish, abort, preempt)──────▶ ended
                                ▼ └──a block, its last token known
                          active, resting

Block tables grow by a block when a sequence's next token needs one. When there is none it sits steps out:
it leaves its row, so that the others go on, and nothing of it is computed meanwhile. If no blocks
come free either, the youngest sequence is preempted: the router replays it later, which costs work but no
request. Blocks of an ended sequence return to the pool when no launched step touches them.
"""

from collections.abc import Iterable

from common.kv.blocks import Allocator
from decode_worker.rows import Rows
from decode_worker.sequence import DecodeSequence, Key


class DecodeScheduler:
    """Owner of every sequence that has blocks here.

    Args:
        max_len: tokens of the longest sequence that a row of the batch has room for.
    """

    def __init__(self, allocator: Allocator, block_size: int, max_num_seqs: int, max_len: int) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_len = min(max_len, allocator.capacity * block_size)
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
        return self.has_row() and self.has_blocks(num_tokens)

    def has_row(self) -> bool:
        """Whether a row is free, those counted that reserved sequences will take."""
        return self.num_taken < self.max_num_seqs

    def has_blocks(self, num_tokens: int, num_held: int = 0) -> bool:
        """Whether there are blocks for a sequence that brings `num_held`, and one for each other to grow."""
        return self.allocator.has(self.num_blocks(num_tokens) - num_held + self.num_taken)

    def reserve(self, sequence: DecodeSequence, held: Iterable[int] = ()) -> None:
        """Admit: the sequence has a row to come and blocks for the tokens it has, first of all those it brings."""
        sequence.block_ids = list(held)
        num_lacking = self.num_blocks(len(sequence.token_ids)) - len(sequence.block_ids)
        sequence.block_ids += self.allocator.allocate(num_lacking)
        self.reserved[sequence.key] = sequence

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
        for sequence in list(self.rows.sequences):
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
        num_wanted = sum(not sequence.num_in_flight for sequence in self.resting)
        num_coming = sum(len(sequence.block_ids) for sequence in self.lingering)
        return num_wanted > num_coming and self.allocator.is_exhausted()

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

    def blocks(self) -> list[list[int]]:
        """Block ids of every owner."""
        return [s.block_ids for s in [*self.reserved.values(), *self.active.values(), *self.lingering]]

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def num_taken(self) -> int:
        """Rows that are taken, or will be."""
        return len(self.active) + len(self.reserved)

    def _has_slot(self, sequence: DecodeSequence) -> bool:
        """Whether its next token has a slot, in a new block if it needs one."""
        if len(sequence.block_ids) < self.num_blocks(sequence.num_scheduled):
            if not self.allocator.has(1):
                return False
            self.rows.grow(sequence, self.allocator.allocate(1)[0])
        return True

    def _free(self, sequence: DecodeSequence) -> None:
        block_ids, sequence.block_ids = sequence.block_ids, []
        self.allocator.free(block_ids)
