"""Which prompt tokens the next step computes, under a token and a block budget.

The order is that of `common.serving.prompts.order`. A prompt is admitted, with blocks for all of it, when its first
tokens are to be computed; from then on nothing that it needs can be missing: of a window as many as a step sees and
writes, which its places take in turns. So one that is overtaken in the midst
keeps its blocks and can always go on, and one that waits for blocks waits for prompts that do go on.

    waiting ──schedule──▶ running ──launched with its last chunk──▶ ending ──take──▶ the caller's
       └───────────────────────┴────────────────────remove────────────┴──▶ lingering ──collected──▶ free

Steps are launched ahead of the device, so a sequence may be removed while a launched step still writes its
blocks: they are free when that is over, as their next owner may be another worker. Torch-free.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.kv.blocks import Allocator
from common.kv.tables import held_by, tables_of
from common.serving.prompts.inquiry import Key
from common.serving.prompts.order import PromptOrder
from common.serving.prompts.prefixes import PromptPrefixes
from common.settings.config import PrefillSection
from prefill_worker.sequence import PromptSequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """`num_tokens` tokens of `sequence` from `sequence.num_scheduled_tokens` on, until `launched`."""

    sequence: PromptSequence
    num_tokens: int

    @property
    def is_last(self) -> bool:
        return self.num_tokens == self.sequence.num_left


class PromptScheduler:
    """Owner of every sequence until it is taken or removed, and of its blocks from admission on.

    Args:
        max_len: tokens of the longest prompt that a step has room for.
        prefixes: what is there of prompts already.
    """

    def __init__(
        self,
        section: PrefillSection,
        allocator: Allocator,
        max_len: int,
        prefixes: PromptPrefixes[PromptSequence],
        *,
        batching: bool,
    ) -> None:
        self.allocator, self.prefixes = allocator, prefixes
        self.layout = allocator.shape.layout
        self.step_tokens = section.max_batch_tokens if section.chunking else max_len
        self.max_len = min(max_len, self.layout.most_tokens(allocator.capacity, self.step_tokens))
        self.order = PromptOrder(
            max_tokens=section.max_batch_tokens,
            max_seqs=section.max_num_seqs if batching else 1,
            max_mixed_tokens=section.max_mixed_tokens,
            chunking=section.chunking,
        )
        self.waiting: list[PromptSequence] = []
        self.running: list[PromptSequence] = []  # admitted, tokens left to schedule
        self.ending: list[PromptSequence] = []  # all tokens launched, the first output awaited
        self.lingering: list[PromptSequence] = []  # removed, blocks still written by steps in flight
        self._of_request: dict[str, list[PromptSequence]] = {}  # of those that are not: attempts, one as a rule

    def objection(self, sequence: PromptSequence) -> str:
        """Why it can never be computed here, however idle the worker is; empty when it can."""
        if sequence.num_slots <= self.max_len:
            return ""
        num_tokens = len(sequence.token_ids)
        return f"the prompt has {num_tokens} tokens, this prefill worker takes at most {self.max_len}; shorten it"

    def add(self, sequence: PromptSequence) -> None:
        self.waiting.append(sequence)
        self._of_request.setdefault(sequence.request_id, []).append(sequence)

    def has(self, key: Key) -> bool:
        """Whether that attempt is owned."""
        request_id, attempt = key
        return any(sequence.attempt == attempt for sequence in self._of_request.get(request_id, ()))

    def schedule(self) -> list[Chunk]:
        """The next step; empty when nothing can run. Who waits for a mask waits for its first step, too."""
        ready = [sequence for sequence in self.waiting if not sequence.awaits_mask]
        pieces = self.order.next_step([*self.running, *ready], self._admit, self.prefixes.is_held_up)
        for sequence, num_tokens in pieces:
            num_before = sequence.num_scheduled_tokens
            for table in sequence.tables:
                table.extend(num_before + 1, num_before + num_tokens)
        return [Chunk(sequence, num_tokens) for sequence, num_tokens in pieces]

    def launched(self, chunks: list[Chunk]) -> None:
        """A step over the chunks is on its way: the next may follow."""
        for chunk in chunks:
            chunk.sequence.num_scheduled_tokens += chunk.num_tokens
            chunk.sequence.num_in_flight += 1
        self.ending += [sequence for sequence in self.running if not sequence.num_left]
        self.running = [sequence for sequence in self.running if sequence.num_left]

    def collected(self, sequences: Iterable[PromptSequence]) -> None:
        """A step over chunks of these is over: those removed meanwhile may let go of their blocks."""
        for sequence in sequences:
            sequence.num_in_flight -= 1
        for sequence in [s for s in self.lingering if not s.num_in_flight]:
            self.lingering.remove(sequence)
            self._free(sequence)

    def take(self, sequence: PromptSequence) -> Sequence[int]:
        """A prompt whose last step is over leaves with the blocks that the next token sees, or lies in: the caller's.

        They are in the order of groups and of places.
        """
        self.ending.remove(sequence)
        self._forget(sequence)
        tables, sequence.tables = sequence.tables, ()
        for table in tables:
            table.extend(len(sequence.token_ids) + 1, sequence.num_slots)
            self.allocator.free(table.trim(len(sequence.token_ids) + 1))
        return held_by(tables)

    def remove(self, request_id: str, attempt: int) -> bool:
        """Forget every attempt up to `attempt`; blocks follow when no step writes them. False when there was none."""
        gone = [s for s in self._of_request.get(request_id, ()) if s.attempt <= attempt]
        for sequence in gone:
            owner = next(owner for owner in (self.ending, self.running, self.waiting) if sequence in owner)
            owner.remove(sequence)
            self._forget(sequence)
            sequence.ended = True
            if sequence.num_in_flight:
                self.lingering.append(sequence)
            else:
                self._free(sequence)
        return bool(gone)

    def sequences(self) -> list[PromptSequence]:
        """Everything owned."""
        return [*self.ending, *self.running, *self.waiting]

    def _admit(self, sequence: PromptSequence) -> bool:
        """Give it blocks for its whole prompt, if there are so many."""
        counts = self.layout.most_blocks(sequence.num_slots, self.step_tokens)
        if (blocks := self.prefixes.take_blocks(sequence, counts)) is None:
            return False
        sequence.tables = tables_of(self.layout, blocks)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return True

    def blocks(self) -> list[Sequence[int]]:
        """Block ids of every owner."""
        owners = [*self.sequences(), *self.lingering]
        return [[*held_by(sequence.tables), *sequence.beginning.granted] for sequence in owners]

    def _forget(self, sequence: PromptSequence) -> None:
        """It is owned no more."""
        self.prefixes.forget(sequence)
        attempts = self._of_request[sequence.request_id]
        attempts.remove(sequence)
        if not attempts:
            del self._of_request[sequence.request_id]

    def _free(self, sequence: PromptSequence) -> None:
        tables, sequence.tables = sequence.tables, ()
        self.allocator.free(held_by(tables))
