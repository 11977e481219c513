"""Which prompt tokens the next step computes: first come, first served, under a token and a block budget.

A prompt is admitted when the pool has blocks for all of it. Prompts longer than what is left of a
step's budget are computed in chunks, and a chunked prompt goes on before anything new begins.

    waiting ──schedule──▶ running ──launched with its last chunk──▶ ending ──take──▶ the caller's
       └───────────────────────┴────────────────────remove────────────┴──▶ free

Steps are launched ahead of the device, so a sequence may be removed while a launched step still
writes its blocks. They are free at once nevertheless: steps run in the order of launch, so whoever gets
the blocks next writes them later, and nobody else reads a block before a step that wrote it for
him is over (`take`). Torch-free.
"""

from collections import deque
from dataclasses import dataclass

from common.config import PrefillSection
from common.kv.blocks import BlockAllocator
from prefill_worker.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """`num_tokens` tokens of `sequence` from `sequence.num_scheduled_tokens` on, until `launched`."""

    sequence: Sequence
    num_tokens: int

    @property
    def is_last(self) -> bool:
        return self.num_tokens == self.sequence.num_left


class Scheduler:
    """Owner of every sequence until it is taken or removed, and of its blocks from admission on.

    Args:
        max_len: tokens of the longest prompt that a step has room for.
    """

    def __init__(
        self, section: PrefillSection, allocator: BlockAllocator, block_size: int, max_len: int, *, batching: bool
    ) -> None:
        self.section = section
        self.allocator = allocator
        self.block_size = block_size
        self.max_len = min(max_len, allocator.capacity * block_size)
        self.max_num_seqs = section.max_num_seqs if batching else 1
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # admitted, tokens left to schedule, oldest first
        self.ending: list[Sequence] = []  # all tokens launched, the first output awaited

    def objection(self, sequence: Sequence) -> str:
        """Why it can never be computed here, however idle the worker is; empty when it can."""
        if len(sequence.token_ids) <= self.max_len:
            return ""
        num_tokens = len(sequence.token_ids)
        return f"the prompt has {num_tokens} tokens, this prefill worker takes at most {self.max_len}; shorten it"

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> list[Chunk]:
        """The next step, oldest prompts first; empty when nothing can run."""
        chunks: list[Chunk] = []
        budget = self.section.max_batch_tokens
        for sequence in self.running[: self.max_num_seqs]:
            budget -= self._append(chunks, sequence, budget)
        while budget > 0 and self.waiting and len(self.running) < self.max_num_seqs and self._starts(chunks, budget):
            sequence = self.waiting.popleft()
            sequence.block_ids = self.allocator.allocate(self._num_blocks(sequence))
            self.running.append(sequence)
            budget -= self._append(chunks, sequence, budget)
        return chunks

    def launched(self, chunks: list[Chunk]) -> None:
        """A step over the chunks is on its way: the next may follow."""
        for chunk in chunks:
            chunk.sequence.num_scheduled_tokens += chunk.num_tokens
        self.ending += [sequence for sequence in self.running if not sequence.num_left]
        self.running = [sequence for sequence in self.running if sequence.num_left]

    def take(self, sequence: Sequence) -> list[int]:
        """A prompt whose last step is over leaves with its blocks: they are complete, and the caller's now."""
        self.ending.remove(sequence)
        block_ids, sequence.block_ids = sequence.block_ids, []
        return block_ids

    def remove(self, request_id: str, attempt: int) -> bool:
        """Forget every attempt up to `attempt`, freeing blocks; False when there was none."""
        gone = [s for s in self.sequences() if s.request_id == request_id and s.attempt <= attempt]
        for sequence in gone:
            owner = next(owner for owner in (self.ending, self.running, self.waiting) if sequence in owner)
            owner.remove(sequence)
            sequence.ended = True
            self.allocator.free(sequence.block_ids)
            sequence.block_ids = []
        return bool(gone)

    def sequences(self) -> list[Sequence]:
        """Everything owned, oldest first."""
        return [*self.ending, *self.running, *self.waiting]

    def _starts(self, chunks: list[Chunk], budget: int) -> bool:
        """Whether the oldest waiting prompt may begin in this step."""
        sequence = self.waiting[0]
        if self._num_blocks(sequence) > self.allocator.num_free:
            return False
        return self.section.chunking or not chunks or sequence.num_left <= budget

    def _append(self, chunks: list[Chunk], sequence: Sequence, budget: int) -> int:
        num_tokens = min(sequence.num_left, budget) if self.section.chunking else sequence.num_left
        if num_tokens > 0:
            chunks.append(Chunk(sequence, num_tokens))
        return num_tokens

    def _num_blocks(self, sequence: Sequence) -> int:
        return -(-len(sequence.token_ids) // self.block_size)
