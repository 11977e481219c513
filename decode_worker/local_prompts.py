"""Prompts computed by the decode worker itself, when no prefill worker can.

In small chunks between decode steps: the streams that run here slow down, and go on. A chunk is of one prompt, and
which that is, `common.serving.prompt_order` decides. It is launched and not waited for, so the tokens of steps before
it are sent meanwhile.
"""

from dataclasses import dataclass

from common.device.prompt_buffers import PromptChunk
from common.device.prompt_runner import PendingPrompts, PromptRunner
from common.device.prompt_scores import PromptScores
from common.serving.prompt_order import PromptOrder
from common.wire.output_token import OutputToken
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import DecodeSequence, Key


@dataclass(slots=True, eq=False)
class LocalPrompt:
    """A prompt on its way."""

    sequence: DecodeSequence
    priority: int
    turn: int
    is_started: bool = False  # it has blocks, and a row to come
    num_launched_tokens: int = 0

    @property
    def num_left(self) -> int:
        return len(self.sequence.token_ids) - self.num_launched_tokens

    def take(self, num_tokens: int) -> PromptChunk:
        """Its next tokens, which are launched."""
        sequence, start = self.sequence, self.num_launched_tokens
        self.num_launched_tokens += num_tokens
        token_ids = sequence.token_ids[start : self.num_launched_tokens]
        for table in sequence.tables:
            table.extend(start + 1, self.num_launched_tokens)
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
    """All prompts until they are complete; at most one chunk is in flight."""

    def __init__(self, runner: PromptRunner, scheduler: DecodeScheduler) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.order = PromptOrder(max_tokens=scheduler.step_tokens, max_seqs=1, max_mixed_tokens=scheduler.step_tokens)
        self.prompts: list[LocalPrompt] = []
        self.next: tuple[LocalPrompt, int] | None = None  # with the number of tokens of its chunk
        self.in_flight: tuple[LocalPrompt, PendingPrompts] | None = None
        self.scored: list[tuple[DecodeSequence, PromptScores]] = []

    def __len__(self) -> int:
        return len(self.prompts)

    def has(self, key: Key) -> bool:
        """Whether a prompt waits; those that have begun are the scheduler's too."""
        return any(sequence.key == key for sequence in self.waiting)

    @property
    def waiting(self) -> list[DecodeSequence]:
        """Those that hold nothing yet."""
        return [prompt.sequence for prompt in self.prompts if not prompt.is_started]

    def accept(self, sequence: DecodeSequence, priority: int, turn: int) -> None:
        self.prompts.append(LocalPrompt(sequence, priority, turn))

    def abort(self, request_id: str, attempt: int) -> None:
        """Forget every attempt up to `attempt`."""
        for prompt in list(self.prompts):
            if prompt.sequence.request_id == request_id and prompt.sequence.attempt <= attempt:
                self._drop(prompt)

    def drop_all(self) -> None:
        """Forget everything."""
        for prompt in list(self.prompts):
            self._drop(prompt)

    def has_chunk(self) -> bool:
        """Whether a chunk can be launched now: none is in flight, and some prompt can go on or begin."""
        if self.in_flight is None and self.next is None:
            ready = [prompt for prompt in self.prompts if not prompt.sequence.awaits_mask]
            self.next = next(iter(self.order.next_step(ready, self._start)), None)
        return self.next is not None

    def launch(self) -> None:
        """Start the chunk that there is."""
        assert self.next is not None and self.in_flight is None, "has_chunk is asked first"
        (prompt, num_tokens), self.next = self.next, None
        self.in_flight = prompt, self.runner.launch([prompt.take(num_tokens)])

    def finish(self) -> tuple[DecodeSequence, OutputToken] | None:
        """A sequence whose prompt is complete and its next token, if the chunk in flight is over and was its last."""
        if self.in_flight is None or not self.in_flight[1].ready():
            return None
        (prompt, chunk), self.in_flight = self.in_flight, None
        [token], [scores] = chunk.tokens(), chunk.scores()
        if prompt.sequence.ended:
            self._drop(prompt)
        elif scores is not None:
            self.scored.append((prompt.sequence, scores))
        if prompt.sequence.ended or token is None:
            return None
        self.prompts.remove(prompt)
        return prompt.sequence, token

    def take_scores(self) -> list[tuple[DecodeSequence, PromptScores]]:
        """What chunks that are over tell of the tokens of prompts that asked; to be sent before their next token."""
        taken, self.scored = self.scored, []
        return taken

    def _start(self, prompt: LocalPrompt) -> bool:
        """Give it blocks and a row to come, if there is room."""
        prompt.is_started = self.scheduler.reserve_prompt(prompt.sequence)
        return prompt.is_started

    def _drop(self, prompt: LocalPrompt) -> None:
        """Free its blocks, or have that done when the chunk that writes them is over."""
        prompt.sequence.ended = True
        if self.in_flight is not None and self.in_flight[0] is prompt:
            return
        if self.next is not None and self.next[0] is prompt:
            self.next = None
        if prompt.is_started:
            self.scheduler.unreserve(prompt.sequence)
        self.prompts.remove(prompt)
