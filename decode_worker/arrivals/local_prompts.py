"""Prompts computed by the decode worker: when no prefill worker can, and short prompts when prefill workers are busy.

Prompts are computed in small chunks between decode steps, so running streams slow down but go on. A chunk holds tokens
of a single prompt, chosen by `common.serving.prompts.order`. The worker does not wait for a launched chunk, so tokens
of earlier steps are sent meanwhile. Cached prefixes are not computed, as in a prefill worker. A short prompt goes back
to the router if more tokens are to be computed than the router expected.
"""

import time
from collections.abc import MutableSequence
from dataclasses import dataclass, field

from common.base.errors import ErrorCode
from common.device.steps.prompt_buffers import PromptChunk
from common.device.steps.prompt_runner import PendingPrompts, PromptRunner
from common.kv.tables import Tables
from common.memory.client.magazine import Magazine
from common.serving.prompts.order import PromptOrder
from common.serving.prompts.prefixes import Beginning, PromptPrefixes
from common.settings.config import Config
from common.wire.messages.worker import Message, PromptCached, RequestFailed
from common.wire.transport.router_link import Load
from common.wire.values.output_token import OutputToken
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sequence import DecodeSequence, Key, is_attempt

WEIGHT = 0.2
"""Weight of the last short prompt in the mean time of short prompts."""


@dataclass(slots=True, eq=False)
class LocalPrompt:
    """A prompt to be computed here."""

    sequence: DecodeSequence
    turn: int
    is_started: bool = False  # has blocks and a reserved row
    num_scheduled_tokens: int = 0  # cached, or computed by launched chunks
    beginning: Beginning = field(default_factory=Beginning)
    most_tokens: int = 0  # more to compute: give the prompt back; 0: no limit

    @property
    def key(self) -> Key:
        return self.sequence.key

    @property
    def priority(self) -> int:
        """Priority; lower is earlier."""
        return self.sequence.priority

    @property
    def token_ids(self) -> MutableSequence[int]:
        """Prompt and, on a replay, the outputs so far."""
        return self.sequence.token_ids

    @property
    def has_blocks(self) -> bool:
        """True once the blocks are granted."""
        return self.beginning.grant is not None

    @property
    def num_slots(self) -> int:
        """Tokens with a place in the prompt's blocks."""
        return self.sequence.num_prompt_slots

    @property
    def num_prompt_logprobs(self) -> int:
        return self.sequence.num_prompt_logprobs

    @property
    def tables(self) -> Tables:
        return self.sequence.tables

    @property
    def num_left(self) -> int:
        return len(self.token_ids) - self.num_scheduled_tokens

    def take(self, num_tokens: int) -> PromptChunk:
        """Return the next tokens as a chunk to launch, and count these tokens as scheduled."""
        sequence, start = self.sequence, self.num_scheduled_tokens
        self.num_scheduled_tokens += num_tokens
        token_ids = sequence.token_ids[start : self.num_scheduled_tokens]
        for table in sequence.tables:
            table.extend(start + 1, self.num_scheduled_tokens)
        return PromptChunk(
            token_ids=token_ids,
            start=start,
            tables=[table.block_ids for table in sequence.tables],
            sampling=sequence.sampling,
            is_last=not self.num_left,
            sequence_ids=sequence.token_ids,
            num_outputs=sequence.num_outputs,
            mask=sequence.mask,
            num_prompt_logprobs=sequence.num_prompt_logprobs,
            first_scored=sequence.first_scored,
        )


class LocalPrompts:
    """Owner of prompts until complete; at most a single chunk is in flight.

    Args:
        worker: id and epoch of the decode worker.
    """

    def __init__(
        self,
        runner: PromptRunner,
        scheduler: DecodeScheduler,
        magazine: Magazine,
        config: Config,
        worker: tuple[str, int],
    ) -> None:
        self.runner, self.scheduler, self.worker = runner, scheduler, worker
        self.prefixes = PromptPrefixes(magazine, self._tell_cached, config.kv, scheduler.capacity.has_blocks)
        self.short_tokens, self.short_s = config.decode.short_prompt_tokens, 0.0  # mean seconds of such a prompt
        self._launched_s, self._num_launched = 0.0, 0  # launch time and tokens of the chunk in flight
        step_tokens = scheduler.capacity.step_tokens
        self.order = PromptOrder(max_tokens=step_tokens, max_seqs=1, max_mixed_tokens=step_tokens)
        self.prompts: list[LocalPrompt] = []
        self.next: tuple[LocalPrompt, int] | None = None  # with the chunk's number of tokens
        self.in_flight: tuple[LocalPrompt, PendingPrompts] | None = None
        self.wants_row: DecodeSequence | None = None  # a prompt that lacks only a row
        self._messages: list[Message] = []

    def __len__(self) -> int:
        return len(self.prompts)

    def has(self, key: Key) -> bool:
        """Tell whether a prompt waits; the scheduler knows prompts that have begun."""
        return any(sequence.key == key for sequence in self.waiting)

    @property
    def waiting(self) -> list[DecodeSequence]:
        """Sequences whose prompts have not begun."""
        return [prompt.sequence for prompt in self._waiting]

    def accept(self, sequence: DecodeSequence, turn: int, salt: bytes, most_tokens: int = 0) -> None:
        """Queue a prompt, and look up its prefix."""
        sequence.offered_s = time.monotonic()
        prompt = LocalPrompt(sequence, turn, most_tokens=most_tokens)
        self.prefixes.begin(prompt, salt)
        self.prompts.append(prompt)

    def abort(self, request_id: str, attempt: int) -> None:
        """Forget every attempt up to `attempt`."""
        for prompt in list(self.prompts):
            if is_attempt(prompt.key, request_id, attempt):
                self._drop(prompt)

    def drop_all(self) -> None:
        for prompt in list(self.prompts):
            self._drop(prompt)

    def choose_chunk(self) -> bool:
        """Choose the next chunk; tell whether there is one: none is in flight, and a prompt can begin or go on.

        Gives back overlong prompts, and notes in `wants_row` a prompt without a row.
        """
        self._give_back()
        self.wants_row = None
        if self.in_flight is None and self.next is None:
            ready = [prompt for prompt in self.prompts if not prompt.sequence.awaits_mask]
            self.next = next(iter(self.order.next_step(ready, self._start, self.prefixes.is_held_up)), None)
        return self.next is not None

    def launch(self) -> None:
        """Launch the chunk chosen by `choose_chunk`."""
        assert self.next is not None and self.in_flight is None, "choose_chunk comes first"
        (prompt, num_tokens), self.next = self.next, None
        self.prefixes.rate.launched(num_tokens)
        self._launched_s, self._num_launched = time.monotonic(), num_tokens
        self.runner.trace.join([prompt.key])
        self.in_flight = prompt, self.runner.launch([prompt.take(num_tokens)])

    def finish(self) -> tuple[DecodeSequence, OutputToken] | None:
        """Return a sequence and its next token, if the chunk in flight has completed a prompt."""
        if self.in_flight is None or not self.in_flight[1].ready():
            return None
        (prompt, chunk), self.in_flight = self.in_flight, None
        self.prefixes.rate.ended()
        self.note_chunk(self._num_launched, time.monotonic() - self._launched_s)
        [token], [scores] = chunk.tokens(), chunk.scores()
        if prompt.sequence.ended:
            self._drop(prompt)
            return None
        if scores is not None:
            self._messages += scores.messages(*self.worker, *prompt.key)
        self.prefixes.computed([(prompt, prompt.num_scheduled_tokens)], self._waiting)
        return None if token is None else (self._complete(prompt), token)

    def note_chunk(self, num_tokens: int, seconds: float) -> None:
        """Update the mean time of short prompts with a chunk's time from launch to end."""
        if num_tokens <= self.short_tokens:
            self.short_s += (seconds - self.short_s) * (WEIGHT if self.short_s else 1.0)

    def tell(self, load: Load) -> None:
        """Report waiting prompts and the time of prompt computation."""
        load.num_waiting += len(self.prompts)
        load.prompt_block_us = self.prefixes.block_us
        load.short_prompt_s = self.short_s

    def make_way(self) -> bool:
        """Give back blocks granted to waiting prompts; tell whether there were any."""
        return self.prefixes.let_go(self._waiting)

    def take_messages(self) -> list[Message]:
        """Take messages about prompts; send them before the prompts' next tokens."""
        taken, self._messages = self._messages, []
        return taken

    @property
    def _waiting(self) -> list[LocalPrompt]:
        return [prompt for prompt in self.prompts if not prompt.is_started]

    def _tell_cached(self, prompt: LocalPrompt) -> None:
        self._messages.append(PromptCached(*self.worker, *prompt.key, prompt.num_scheduled_tokens))

    def _give_back(self) -> None:
        """Return prompts to the router if more tokens must be computed than `most_tokens`."""
        known = [prompt for prompt in self._waiting if prompt.most_tokens and not self.prefixes.is_held_up(prompt)]
        for prompt in [prompt for prompt in known if prompt.num_left > prompt.most_tokens]:
            reason = f"{prompt.num_left} tokens are to be computed, not {prompt.most_tokens} at most"
            self._messages.append(RequestFailed(*self.worker, *prompt.key, ErrorCode.NOT_HERE, reason))
            self._drop(prompt)

    def _start(self, prompt: LocalPrompt) -> bool:
        """Allocate blocks beyond the found prefix and reserve a row, if there is room."""
        if not self.scheduler.capacity.has_row():
            self.wants_row = self.wants_row or prompt.sequence
            return False
        blocks = self.prefixes.take_blocks(prompt, self.scheduler.capacity.num_blocks_of_prompt(prompt.sequence))
        if blocks is None:
            return False
        self.scheduler.reserve_prompt(prompt.sequence, blocks)
        prompt.is_started = True
        return True

    def _complete(self, prompt: LocalPrompt) -> DecodeSequence:
        """Release a complete prompt; decoding goes on with the prompt's chain of keys."""
        self.prompts.remove(prompt)
        self.prefixes.forget(prompt)
        sequence = prompt.sequence
        sequence.num_sealed, sequence.digest = prompt.beginning.num_sealed, prompt.beginning.last_digest
        return sequence

    def _drop(self, prompt: LocalPrompt) -> None:
        """Forget a prompt and free its blocks, or leave the freeing to the end of a chunk in flight."""
        prompt.sequence.ended = True
        self.prefixes.forget(prompt)
        if self.in_flight is not None and self.in_flight[0] is prompt:
            return
        if self.next is not None and self.next[0] is prompt:
            self.next = None
        if prompt.is_started:
            self.scheduler.unreserve(prompt.sequence)
        self.prompts.remove(prompt)
