"""Steps of prompts: launched ahead of the device, and collected in order.

A worker calls `schedule` and `launch` for the next step, and `collect` for the oldest step. No method waits for the
device.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from common.device.steps.loop_trace import WAIT
from common.device.steps.prompt_buffers import PromptChunk
from common.device.steps.prompt_runner import PendingPrompts, PromptRunner
from common.serving.prompts.scheduler import Chunk, PromptScheduler
from common.serving.prompts.sequence import AnyPrompt
from common.serving.turns.law import SIDE_BY_SIDE
from common.serving.turns.prompt_turns import Launched, StepPlans
from common.wire.messages.worker import Message
from common.wire.values.output_token import OutputToken


@dataclass(frozen=True, slots=True)
class PromptStep(Generic[AnyPrompt]):
    """A launched step and the prompts of its chunks."""

    pending: PendingPrompts
    prompts: list[AnyPrompt]
    ends: list[int]  # tokens of each prompt computed after the step
    num_tokens: int  # computed by the step
    launched_s: float
    launched: Launched  # its plan, and what it had of the GPU

    def reached(self) -> list[tuple[AnyPrompt, int]]:
        """Return live prompts, each with the number of computed tokens."""
        pairs = zip(self.prompts, self.ends, strict=True)
        return [(prompt, end) for prompt, end in pairs if not prompt.ended]

    def unfinished(self) -> list[tuple[AnyPrompt, int]]:
        """Return live prompts with tokens left to compute, each with the number of computed tokens."""
        return [(prompt, end) for prompt, end in self.reached() if end < len(prompt.token_ids)]


class PromptSteps(Generic[AnyPrompt]):
    """Owner of the steps in flight.

    Args:
        send: sends log-probabilities of prompts to the router.
        worker: id and epoch of this worker.
        max_in_flight: steps launched ahead of the device.
        plans: decides about turns, and about the whole GPU.
    """

    def __init__(
        self,
        runner: PromptRunner,
        scheduler: PromptScheduler[AnyPrompt],
        send: Callable[[Message], None],
        worker: tuple[str, int],
        max_in_flight: int,
        plans: StepPlans | None = None,
    ) -> None:
        self.runner, self.scheduler, self.send, self.worker = runner, scheduler, send, worker
        self.prefixes, self.trace, self.max_in_flight = scheduler.prefixes, runner.trace, max_in_flight
        self.in_flight: deque[PromptStep[AnyPrompt]] = deque()  # oldest first
        self.plans, self.plan = plans or StepPlans(), SIDE_BY_SIDE

    def schedule(self) -> list[Chunk[AnyPrompt]]:
        """Return the next step's chunks, to be launched at once; none while enough steps are in flight."""
        if len(self.in_flight) >= self.max_in_flight:
            return []
        self.plan = self.plans.plan(self.scheduler.in_turn, [step.launched for step in self.in_flight])
        return self.scheduler.schedule(sum(step.num_tokens for step in self.in_flight), self.plan.num_tokens)

    def launch(self, chunks: list[Chunk[AnyPrompt]]) -> None:
        """Launch a step over the chunks that were just scheduled."""
        prompts, num_tokens = [chunk.sequence for chunk in chunks], sum(chunk.num_tokens for chunk in chunks)
        launched_s, inputs = time.monotonic(), [_prompt_chunk(chunk) for chunk in chunks]
        self.trace.join(prompt.key for prompt in prompts)
        self.prefixes.rate.launched(num_tokens)
        done = [(chunk.end - chunk.start, chunk.start) for chunk in inputs]
        launched = Launched(self.plan, done, self.plans.has_whole(self.plan, done))
        pending = self.runner.launch(inputs, whole_gpu=launched.has_whole)
        if not self.in_flight:
            self.plans.begin(launched)
        ends = [chunk.end for chunk in inputs]
        self.in_flight.append(PromptStep(pending, prompts, ends, num_tokens, launched_s, launched))
        self.scheduler.launched(chunks)

    def collect(self) -> tuple[PromptStep[AnyPrompt], list[tuple[AnyPrompt, OutputToken]]] | None:
        """Return the oldest step if over, and live prompts that are complete, each with its first token.

        Full blocks are sealed, and log-probabilities of prompt tokens are sent.
        """
        if not self.in_flight or not self.in_flight[0].pending.ready():
            return None
        step = self.in_flight.popleft()
        with self.trace.phase(WAIT):  # a moment, because the step is over
            tokens = step.pending.tokens()
        self.prefixes.rate.ended()
        self.plans.end(step.launched, self.in_flight[0].launched if self.in_flight else None)
        self.scheduler.collected(step.prompts)
        for prompt, scores in zip(step.prompts, step.pending.scores(), strict=True):
            for message in () if scores is None or prompt.ended else scores.messages(*self.worker, *prompt.key):
                self.send(message)
        self.prefixes.computed(step.reached(), self.scheduler.waiting)
        pairs = zip(step.prompts, tokens, strict=True)
        return step, [(prompt, token) for prompt, token in pairs if token is not None and not prompt.ended]


def _prompt_chunk(chunk: Chunk[AnyPrompt]) -> PromptChunk:
    prompt, request, start = chunk.sequence, chunk.sequence.request, chunk.sequence.num_scheduled_tokens
    return PromptChunk(
        token_ids=prompt.token_ids[start : start + chunk.num_tokens],
        start=start,
        tables=[table.block_ids for table in prompt.tables],
        sampling=request.sampling,
        is_last=chunk.is_last,
        sequence_ids=prompt.token_ids,
        num_outputs=request.num_outputs,
        mask=None if prompt.grammar is None else prompt.grammar.mask,
        found_states=chunk.found_states,
        snapshots=chunk.snapshots,
        num_prompt_logprobs=request.num_prompt_logprobs,
        first_scored=request.first_scored,
    )
