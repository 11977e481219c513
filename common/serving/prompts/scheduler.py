"""Choice of prompt tokens for the next step, under a token budget and a block budget.

`order` gives the order. A prompt is admitted for its first chunk, with blocks for the whole prompt, so an admitted
prompt never lacks blocks. A window group needs only as many blocks as a step reads and writes; the window's places
reuse the blocks in turn. So an overtaken prompt keeps all blocks and can always go on. A prompt without blocks waits
only for prompts that can go on.

    waiting ──schedule──▶ started ──launched with its last chunk──▶ ending ──take──▶ owned by the caller
       └───────────────────────┴────────────────────remove────────────┴──▶ removed ──collected──▶ free.

Steps are launched ahead of the device, so a prompt may be removed while a launched step still writes the blocks. Such
blocks are freed only after the step, because the next owner may be another worker. Torch-free.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic

from common.kv.blocks import Allocator
from common.kv.tables import Tables, held_by, take_gone
from common.serving.prompts.checkpoints import StateCopy
from common.serving.prompts.order import PromptOrder, turn_of
from common.serving.prompts.prefixes import PromptPrefixes
from common.serving.prompts.requests import Key
from common.serving.prompts.sequence import AnyPrompt


@dataclass(frozen=True, slots=True)
class Chunk(Generic[AnyPrompt]):
    """A scheduled part of a prompt: `num_tokens` tokens from `sequence.num_scheduled_tokens` on, until `launched`."""

    sequence: AnyPrompt
    num_tokens: int
    found_states: Sequence[StateCopy] = ()  # before the step
    snapshots: Sequence[StateCopy] = ()  # behind the step
    leaving: Sequence[int] = ()  # blocks to free after the step

    @property
    def is_last(self) -> bool:
        return self.num_tokens == self.sequence.num_left


class PromptRows(Generic[AnyPrompt]):
    """Rows of a batch, if an admitted prompt needs a row beside blocks; the base class has no limit."""

    def has_row(self, prompt: AnyPrompt) -> bool:
        """Tell whether a row is free for a prompt whose turn has come."""
        return True

    def reserve(self, prompt: AnyPrompt) -> None:
        """Reserve a free row."""

    def release(self, prompt: AnyPrompt) -> None:
        """Give the row of a removed prompt back."""


class PromptScheduler(Generic[AnyPrompt]):
    """Owner of every prompt until taken or removed, and of the prompt's blocks from admission on.

    Args:
        max_len: longest prompt that fits into a step, in tokens.
        prefixes: grants blocks, cached prefixes included.
        rows: given to admitted prompts; `take` leaves the row with the prompt.
    """

    def __init__(
        self,
        order: PromptOrder,
        allocator: Allocator,
        max_len: int,
        prefixes: PromptPrefixes[AnyPrompt],
        rows: PromptRows[AnyPrompt] | None = None,
    ) -> None:
        self.order, self.allocator, self.prefixes = order, allocator, prefixes
        self.rows: PromptRows[AnyPrompt] = rows or PromptRows()
        self.layout = allocator.shape.layout
        self.step_tokens = order.max_tokens if order.chunking else max_len
        self.max_len = min(max_len, allocator.shape.most_tokens(self.step_tokens))
        self.prompts: dict[Key, AnyPrompt] = {}  # in order of arrival
        self._attempts: dict[str, list[int]] = {}  # of each request; mostly single
        self.removed: list[AnyPrompt] = []  # blocks are still written by steps in flight

    @property
    def waiting(self) -> list[AnyPrompt]:
        """Prompts not admitted yet."""
        return [prompt for prompt in self.prompts.values() if not prompt.is_started]

    def objection(self, prompt: AnyPrompt) -> str:
        """Say why a prompt can never be computed here, even by an idle worker; "" when possible."""
        if prompt.num_slots <= self.max_len:
            return ""
        num_tokens = len(prompt.token_ids)
        return f"the prompt has {num_tokens} tokens, this prefill worker takes at most {self.max_len}; shorten it"

    def add(self, prompt: AnyPrompt) -> None:
        """Queue a prompt, and look up its prefix."""
        prompt.beginning.num_blocks = self.layout.most_blocks(prompt.num_slots, self.step_tokens)
        self.prefixes.begin(prompt)
        self.prompts[prompt.key] = prompt
        self._attempts.setdefault(prompt.request.request_id, []).append(prompt.request.attempt)

    @property
    def ready(self) -> list[AnyPrompt]:
        """Prompts with tokens to launch; a prompt without its mask does not start."""
        return [prompt for prompt in self.prompts.values() if prompt.num_left and not prompt.awaits_mask]

    @property
    def in_turn(self) -> list[AnyPrompt]:
        """Prompts of `ready` that wait for nothing but the device, in order of turn."""
        return sorted((prompt for prompt in self.ready if not self.prefixes.lacks_blocks(prompt)), key=turn_of)

    def schedule(self, num_launched: int = 0, most: int = 0) -> list[Chunk[AnyPrompt]]:
        """Return the next step's chunks; empty when no prompt can run.

        Args:
            num_launched: tokens of the steps in flight.
            most: limit of the step beyond the usual; 0: no more.
        """
        checkpoints, is_held_up = self.prefixes.checkpoints, self.prefixes.is_held_up
        pieces = self.order.next_step(
            self.ready,
            self._admit,
            is_held_up,
            checkpoints.num_next,
            checkpoints.cut,
            num_launched=num_launched,
            most=most,
        )
        return [self._chunk(prompt, num_tokens) for prompt, num_tokens in pieces]

    def launched(self, chunks: Iterable[Chunk[AnyPrompt]]) -> None:
        """Record a launched step over the chunks; `schedule` may follow."""
        for chunk in chunks:
            chunk.sequence.num_scheduled_tokens += chunk.num_tokens
            chunk.sequence.num_in_flight += 1
            chunk.sequence.leaving.append(list(chunk.leaving))

    def collected(self, prompts: Iterable[AnyPrompt]) -> None:
        """Record a finished step over the prompts; removed prompts without steps in flight free their blocks."""
        for prompt in prompts:
            prompt.num_in_flight -= 1
            if leaving := prompt.leaving.popleft():
                self.allocator.free(leaving)
        for prompt in [prompt for prompt in self.removed if not prompt.num_in_flight]:
            self.removed.remove(prompt)
            self._free(prompt)

    def take(self, prompt: AnyPrompt) -> Tables:
        """Give a complete prompt's blocks to the caller: all blocks read or written by the next token."""
        self._forget(prompt)
        tables, prompt.tables = prompt.tables, ()
        for table in tables:
            table.extend(len(prompt.token_ids) + 1, prompt.num_slots)
            self.allocator.free([*table.take_gone(), *table.trim(len(prompt.token_ids) + 1)])
        return tables

    def remove(self, request_id: str, attempt: int) -> list[AnyPrompt]:
        """Forget and return every attempt up to `attempt`; blocks are freed after steps in flight."""
        gone = [self.prompts[request_id, each] for each in self._attempts.get(request_id, ()) if each <= attempt]
        for prompt in gone:
            self._forget(prompt)
            prompt.ended = True
            if prompt.num_in_flight:
                self.removed.append(prompt)
            else:
                self._free(prompt)
        return gone

    def _admit(self, prompt: AnyPrompt) -> bool:
        """Admit a prompt with a row and blocks for the whole prompt; return false when something is missing."""
        if not self.rows.has_row(prompt) or (tables := self.prefixes.take_blocks(prompt)) is None:
            return False
        prompt.tables = tables
        self.rows.reserve(prompt)
        return True

    def _chunk(self, prompt: AnyPrompt, num_tokens: int) -> Chunk[AnyPrompt]:
        """Return the next chunk of a prompt, with blocks for its tokens."""
        checkpoints, begin, beginning = self.prefixes.checkpoints, prompt.num_scheduled_tokens, prompt.beginning
        for table in prompt.tables:
            table.extend(begin + 1, begin + num_tokens)
        leaving, found = take_gone(prompt.tables), []
        if beginning.snapshots:
            states = [prompt.tables[number].block_ids[0] for number in self.layout.states]
            found = list(map(StateCopy, beginning.snapshots, states))
            leaving, beginning.snapshots = leaving + beginning.snapshots, []
        return Chunk(prompt, num_tokens, found, checkpoints.prepare(prompt, begin + num_tokens), leaving)

    def _forget(self, prompt: AnyPrompt) -> None:
        """Give up ownership of a prompt."""
        del self.prompts[prompt.key]
        self.prefixes.forget(prompt)
        attempts = self._attempts[prompt.request.request_id]
        attempts.remove(prompt.request.attempt)
        if not attempts:
            del self._attempts[prompt.request.request_id]

    def _free(self, prompt: AnyPrompt) -> None:
        if prompt.is_started:
            self.rows.release(prompt)
        tables, prompt.tables = prompt.tables, ()
        beginning, states = prompt.beginning, self.layout.states
        due = (each.block_id for each in beginning.due if self.allocator.shape.group_of(each.block_id) in states)
        self.allocator.free([*held_by(tables), *beginning.snapshots, *due])
