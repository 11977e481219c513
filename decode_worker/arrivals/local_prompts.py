"""Prompts computed by the decode worker: when no prefill worker can, and short prompts when prefill workers are busy.

Prompts are computed in small chunks between decode steps, so running streams slow down but go on. A chunk holds tokens
of a single prompt. The worker does not wait for a launched chunk, so tokens of earlier steps are sent meanwhile. A
short prompt goes back to the router if more tokens are to be computed than the router expected.
"""

import time
from dataclasses import dataclass

from common.base.errors import ErrorCode
from common.device.steps.prompt_runner import PromptRunner
from common.memory.client.lease_cache import LeaseCache
from common.serving.prompts.order import PromptOrder
from common.serving.prompts.prefixes import PromptPrefixes
from common.serving.prompts.scheduler import Chunk, PromptRows, PromptScheduler
from common.serving.prompts.sequence import PromptSequence
from common.serving.prompts.steps import PromptSteps
from common.settings.config import Config
from common.wire.messages.worker import PrefillRequest, PromptCached, RequestFailed
from common.wire.transport.router_link import RouterLink
from common.wire.values.kv_layout import Counts
from common.wire.values.output_token import OutputToken
from decode_worker.sequences.capacity import Capacity
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sequence import DecodeSequence, SealedChain

WEIGHT = 0.2
"""Weight of the last short prompt in the mean time of short prompts."""


@dataclass(slots=True, eq=False, kw_only=True)
class LocalPrompt(PromptSequence):
    """A prompt to be computed here, and the sequence to be decoded."""

    sequence: DecodeSequence

    @classmethod
    def of(cls, request: PrefillRequest, sequence: DecodeSequence) -> "LocalPrompt":
        """Make the prompt of a request; tokens and grammar are shared with the sequence."""
        return cls(request, sequence.token_ids, sequence.grammar, sequence=sequence)


class LocalRows(PromptRows[LocalPrompt]):
    """Rows of the batch for prompts computed here."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.wanted: DecodeSequence | None = None  # of the first prompt that lacks a row

    def has_row(self, prompt: LocalPrompt) -> bool:
        if self.capacity.has_row():
            return True
        self.wanted = self.wanted or prompt.sequence
        return False

    def reserve(self, prompt: LocalPrompt) -> None:
        self.capacity.count_row(prompt.sequence, 1)

    def release(self, prompt: LocalPrompt) -> None:
        self.capacity.count_row(prompt.sequence, -1)


class LocalPrompts:
    """Prompts until complete; at most a single chunk is in flight."""

    def __init__(
        self, runner: PromptRunner, decoding: DecodeScheduler, leases: LeaseCache, config: Config, link: RouterLink
    ) -> None:
        self.decoding, self.link, self.worker = decoding, link, link.worker
        capacity = decoding.capacity

        def reserve() -> Counts:
            return capacity.num_growing

        self.prefixes = PromptPrefixes(leases, self._report_cached, config.kv, capacity.has_blocks, reserve=reserve)
        self.rows = LocalRows(capacity)
        order = PromptOrder(capacity.step_tokens, max_seqs=1, max_mixed_tokens=capacity.step_tokens)
        self.scheduler = PromptScheduler(order, capacity.allocator, capacity.max_len, self.prefixes, self.rows)
        self.steps = PromptSteps(runner, self.scheduler, link.send, self.worker, max_in_flight=1)
        self.short_tokens = config.decode.short_prompt_tokens
        self.short_s = 0.0  # mean time of a prompt of at most `short_tokens`, from launch to end

    def __len__(self) -> int:
        return len(self.scheduler.prompts) + len(self.scheduler.removed)

    def add(self, prompt: LocalPrompt) -> None:
        """Queue a prompt, and look up its prefix."""
        prompt.sequence.offered_s = time.monotonic()
        self.scheduler.add(prompt)

    def abort(self, request_id: str, attempt: int) -> None:
        """Forget every attempt up to `attempt`."""
        for prompt in self.scheduler.remove(request_id, attempt):
            prompt.sequence.ended = True

    def abort_all(self) -> None:
        for key in list(self.scheduler.prompts):
            self.abort(*key)

    def schedule(self) -> list[Chunk[LocalPrompt]]:
        """Return the next chunk, if none is in flight and a prompt can go on; set `rows.wanted`."""
        self._return_long()
        self.rows.wanted = None
        return self.steps.schedule()

    def collect(self) -> list[tuple[DecodeSequence, OutputToken]]:
        """Let complete prompts decode, if the chunk in flight is over; return each with its next token."""
        if (collected := self.steps.collect()) is None:
            return []
        step, complete = collected
        self.add_time(step.num_tokens, time.monotonic() - step.launched_s)
        for prompt, _ in complete:
            prompt.sequence.chain = SealedChain(prompt.beginning.num_sealed, prompt.beginning.last_digest)
            self.decoding.adopt(prompt.sequence, self.scheduler.take(prompt))
        return [(prompt.sequence, token) for prompt, token in complete]

    def add_time(self, num_tokens: int, seconds: float) -> None:
        """Update the mean time of short prompts with a chunk's time."""
        if num_tokens <= self.short_tokens:
            self.short_s += (seconds - self.short_s) * (WEIGHT if self.short_s else 1.0)

    def _report_cached(self, prompt: LocalPrompt) -> None:
        self.link.send(PromptCached(*self.worker, *prompt.key, prompt.num_scheduled_tokens))

    def _return_long(self) -> None:
        """Return prompts to the router if more tokens must be computed than `most_tokens`."""
        for prompt in self.scheduler.waiting:
            most_tokens = prompt.request.most_tokens
            if most_tokens and prompt.num_left > most_tokens and not self.prefixes.is_held_up(prompt):
                reason = f"{prompt.num_left} tokens are to be computed, not {most_tokens} at most"
                self.link.send(RequestFailed(*self.worker, *prompt.key, ErrorCode.NOT_HERE, reason))
                self.abort(*prompt.key)
