"""Choice of prompt tokens for the next step, under a token budget and a block budget.

`common.serving.prompts.order` gives the order. A prompt is admitted for its first chunk, with blocks for the whole
prompt, so an admitted prompt never lacks blocks. A window group needs only as many blocks as a step reads and writes;
the window's places reuse the blocks in turn. So an overtaken prompt keeps all blocks and can always go on. A prompt
without blocks waits only for prompts that can go on.

    waiting ──schedule──▶ running ──launched with its last chunk──▶ ending ──take──▶ owned by the caller
       └───────────────────────┴────────────────────remove────────────┴──▶ lingering ──collected──▶ free.

Steps are launched ahead of the device, so a sequence may be removed while a launched step still writes the blocks. Such
blocks are freed only after the step, because the next owner may be another worker. Torch-free.
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
    """A scheduled part of a prompt: `num_tokens` tokens from `sequence.num_scheduled_tokens` on, until `launched`."""

    sequence: PromptSequence
    num_tokens: int

    @property
    def is_last(self) -> bool:
        return self.num_tokens == self.sequence.num_left


class PromptScheduler:
    """Owner of every sequence until taken or removed, and of the sequence's blocks from admission on.

    Args:
        max_len: longest prompt that fits into a step, in tokens.
        prefixes: grants blocks, cached prefixes included.
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
        self._of_request: dict[str, list[PromptSequence]] = {}  # attempts, without lingering; mostly single

    def objection(self, sequence: PromptSequence) -> str:
        """Say why a prompt can never be computed here, even by an idle worker; "" when possible."""
        if sequence.num_slots <= self.max_len:
            return ""
        num_tokens = len(sequence.token_ids)
        return f"the prompt has {num_tokens} tokens, this prefill worker takes at most {self.max_len}; shorten it"

    def add(self, sequence: PromptSequence) -> None:
        self.waiting.append(sequence)
        self._of_request.setdefault(sequence.request_id, []).append(sequence)

    def has(self, key: Key) -> bool:
        """Tell whether an attempt is owned."""
        request_id, attempt = key
        return any(sequence.attempt == attempt for sequence in self._of_request.get(request_id, ()))

    def schedule(self) -> list[Chunk]:
        """Return the next step's chunks; empty when no prompt can run. A prompt without its mask does not start."""
        ready = [sequence for sequence in self.waiting if not sequence.awaits_mask]
        pieces = self.order.next_step([*self.running, *ready], self._admit, self.prefixes.is_held_up)
        for sequence, num_tokens in pieces:
            num_before = sequence.num_scheduled_tokens
            for table in sequence.tables:
                table.extend(num_before + 1, num_before + num_tokens)
        return [Chunk(sequence, num_tokens) for sequence, num_tokens in pieces]

    def launched(self, chunks: list[Chunk]) -> None:
        """Note a launched step over the chunks; `schedule` may follow."""
        for chunk in chunks:
            chunk.sequence.num_scheduled_tokens += chunk.num_tokens
            chunk.sequence.num_in_flight += 1
        self.ending += [sequence for sequence in self.running if not sequence.num_left]
        self.running = [sequence for sequence in self.running if sequence.num_left]

    def collected(self, sequences: Iterable[PromptSequence]) -> None:
        """Note a finished step over the sequences; removed sequences without steps in flight free their blocks."""
        for sequence in sequences:
            sequence.num_in_flight -= 1
        for sequence in [s for s in self.lingering if not s.num_in_flight]:
            self.lingering.remove(sequence)
            self._free(sequence)

    def take(self, sequence: PromptSequence) -> Sequence[int]:
        """Give a complete prompt's blocks to the caller: all blocks read or written by the next token.

        The blocks are ordered by group and place.
        """
        self.ending.remove(sequence)
        self._forget(sequence)
        tables, sequence.tables = sequence.tables, ()
        for table in tables:
            table.extend(len(sequence.token_ids) + 1, sequence.num_slots)
            self.allocator.free(table.trim(len(sequence.token_ids) + 1))
        return held_by(tables)

    def remove(self, request_id: str, attempt: int) -> bool:
        """Forget every attempt up to `attempt`; return false without any. Blocks are freed after steps in flight."""
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
        """Return all owned sequences."""
        return [*self.ending, *self.running, *self.waiting]

    def _admit(self, sequence: PromptSequence) -> bool:
        """Admit a prompt with blocks for the whole prompt; return false when blocks are missing."""
        counts = self.layout.most_blocks(sequence.num_slots, self.step_tokens)
        if (blocks := self.prefixes.take_blocks(sequence, counts)) is None:
            return False
        sequence.tables = tables_of(self.layout, blocks)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return True

    def blocks(self) -> list[Sequence[int]]:
        """Return the block ids of every sequence, lingering sequences included."""
        owners = [*self.sequences(), *self.lingering]
        return [[*held_by(sequence.tables), *sequence.beginning.granted] for sequence in owners]

    def _forget(self, sequence: PromptSequence) -> None:
        """Give up ownership of a sequence."""
        self.prefixes.forget(sequence)
        attempts = self._of_request[sequence.request_id]
        attempts.remove(sequence)
        if not attempts:
            del self._of_request[sequence.request_id]

    def _free(self, sequence: PromptSequence) -> None:
        tables, sequence.tables = sequence.tables, ()
        self.allocator.free(held_by(tables))
