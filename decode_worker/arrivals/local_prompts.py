"""Prompts computed by the decode worker: when no prefill worker can, and short prompts when prefill workers are busy.

Prompts are computed in small chunks between decode steps, so running streams slow down but go on. A chunk holds tokens
of a single prompt, chosen by `common.serving.prompts.order`. The worker does not wait for a launched chunk, so tokens
of earlier steps are sent meanwhile. Cached prefixes are not computed, as in a prefill worker. A short prompt goes back
to the router if more tokens are to be computed than the router expected.
"""

import time

from common.base.errors import ErrorCode
from common.device.steps.prompt_runner import PendingPrompts, PromptRunner
from common.memory.client.lease_cache import LeaseCache
from common.serving.prompts.order import PromptOrder
from common.serving.prompts.prefixes import PromptPrefixes
from common.settings.config import Config
from common.wire.messages.worker import Message, PromptCached, RequestFailed
from common.wire.transport.router_link import Load
from common.wire.values.output_token import OutputToken
from decode_worker.arrivals.local_prompt import LocalPrompt
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sequence import DecodeSequence, Key, is_attempt

WEIGHT = 0.2
"""Weight of the last short prompt in the mean time of short prompts."""


class ChunkTimes:
    """Mean time of short prompts, from launch to end.

    Args:
        short_tokens: most tokens of a short prompt.
    """

    def __init__(self, short_tokens: int) -> None:
        self.short_tokens, self.short_s = short_tokens, 0.0
        self._launched_s, self._num_launched = 0.0, 0  # of the chunk in flight

    def launched(self, num_tokens: int) -> None:
        self._launched_s, self._num_launched = time.monotonic(), num_tokens

    def ended(self) -> None:
        self.add(self._num_launched, time.monotonic() - self._launched_s)

    def add(self, num_tokens: int, seconds: float) -> None:
        """Update the mean with a chunk's time."""
        if num_tokens <= self.short_tokens:
            self.short_s += (seconds - self.short_s) * (WEIGHT if self.short_s else 1.0)


class LocalPrompts:
    """Owner of prompts until complete; at most a single chunk is in flight.

    Args:
        worker: id and epoch of the decode worker.
    """

    def __init__(
        self,
        runner: PromptRunner,
        scheduler: DecodeScheduler,
        leases: LeaseCache,
        config: Config,
        worker: tuple[str, int],
    ) -> None:
        self.runner, self.scheduler, self.worker = runner, scheduler, worker
        self.prefixes = PromptPrefixes(leases, self._report_cached, config.kv, scheduler.capacity.has_blocks)
        self.times = ChunkTimes(config.decode.short_prompt_tokens)
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
        return any(prompt.key == key for prompt in self.waiting)

    @property
    def waiting(self) -> list[LocalPrompt]:
        """Prompts that have not begun."""
        return [prompt for prompt in self.prompts if not prompt.is_started]

    def accept(self, prompt: LocalPrompt, salt: bytes) -> None:
        """Queue a prompt, and look up its prefix."""
        prompt.sequence.offered_s = time.monotonic()
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
        self.times.launched(num_tokens)
        self.runner.trace.join([prompt.key])
        self.in_flight = prompt, self.runner.launch([prompt.take(num_tokens)])

    def finish(self) -> tuple[DecodeSequence, OutputToken] | None:
        """Return a sequence and its next token, if the chunk in flight has completed a prompt."""
        if self.in_flight is None or not self.in_flight[1].ready():
            return None
        (prompt, chunk), self.in_flight = self.in_flight, None
        self.prefixes.rate.ended()
        self.times.ended()
        [token], [scores] = chunk.tokens(), chunk.scores()
        if prompt.sequence.ended:
            self._drop(prompt)
            return None
        if scores is not None:
            self._messages += scores.messages(*self.worker, *prompt.key)
        self.prefixes.computed([(prompt, prompt.num_scheduled_tokens)], self.waiting)
        return None if token is None else (self._complete(prompt), token)

    def report(self, load: Load) -> None:
        """Report waiting prompts and the time of prompt computation."""
        load.num_waiting += len(self.prompts)
        load.prompt_block_us = self.prefixes.block_us
        load.short_prompt_s = self.times.short_s

    def make_way(self) -> bool:
        """Give back blocks granted to waiting prompts; tell whether there were any."""
        return self.prefixes.let_go(self.waiting)

    def take_messages(self) -> list[Message]:
        """Take messages about prompts; send them before the prompts' next tokens."""
        taken, self._messages = self._messages, []
        return taken

    def _report_cached(self, prompt: LocalPrompt) -> None:
        self._messages.append(PromptCached(*self.worker, *prompt.key, prompt.num_scheduled_tokens))

    def _give_back(self) -> None:
        """Return prompts to the router if more tokens must be computed than `most_tokens`."""
        known = [prompt for prompt in self.waiting if prompt.most_tokens and not self.prefixes.is_held_up(prompt)]
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
