"""Choice of prompt tokens for the next step: two thirds by turn, a third by remaining length.

The order by turn comes from the router: `priority`, then `turn`. `turn` is first come, first served, and fair between
clients. The order by remaining length is shortest first, so short prompts **overtake** long ones. For every two tokens
computed by turn, a token may be computed ahead of turn. A prompt is therefore complete after at most 1.5 times the
tokens of an order by turn alone, plus a third of a step. Later arrivals do not change the bound. A short prompt joins
the next step, regardless of the backlog before it.

Two orders at fixed shares, each as good as alone at its share of the speed: Purohit, Svitkina and Kumar. "Improving
Online Algorithms via ML Predictions" (NeurIPS 2018, section 3). Steps with pieces of long prompts and short prompts:
Agrawal et al. "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (OSDI 2024).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

SHORT_STEP_TOKENS, SHORT_QUEUE_TOKENS = 2048, 8192
"""Limit of a step while several prompts wait, and tokens up to which a queue is short, with those of running steps.

A step of eight prompts ends for all eight at once; in short steps most are complete much sooner, and the last hardly
later. Long queues need the speed of full steps. Running steps count because a worker never has a long queue of its own:
the router's window lets one full step wait behind those that are launched.
"""


class Prompt(Protocol):
    """Properties of a prompt used for ordering; prompts are compared by identity."""

    @property
    def priority(self) -> int:
        """First sort key; lower is earlier."""

    @property
    def turn(self) -> int:
        """Second sort key, within a priority; lower is earlier."""

    @property
    def num_left(self) -> int:
        """Tokens to compute, above 0."""

    @property
    def is_started(self) -> bool:
        """True once the prompt holds all resources needed to continue."""

    @property
    def has_blocks(self) -> bool:
        """True if the prompt owns its blocks, so it may start before an earlier prompt without blocks."""


AnyPrompt = TypeVar("AnyPrompt", bound=Prompt)


@dataclass(slots=True)
class _Step(Generic[AnyPrompt]):
    """A step being filled."""

    num_tokens_left: int
    is_held_up: Callable[[AnyPrompt], bool]
    num_next: Callable[[AnyPrompt], int]
    cut: Callable[[AnyPrompt, int], int]
    pieces: dict[AnyPrompt, int] = field(default_factory=dict)

    def add(self, prompt: AnyPrompt, num_tokens: int) -> None:
        self.pieces[prompt] = self.pieces.get(prompt, 0) + num_tokens
        self.num_tokens_left -= num_tokens

    def num_left(self, prompt: AnyPrompt) -> int:
        """Return the tokens of the prompt still available to the step."""
        return 0 if self.is_held_up(prompt) else self.num_next(prompt) - self.pieces.get(prompt, 0)

    def piece(self, prompt: AnyPrompt, num_tokens: int) -> int:
        """Return at most `num_tokens` more of the prompt, fewer if the chunk is cut."""
        num_taken, num_tokens = self.pieces.get(prompt, 0), min(self.num_left(prompt), num_tokens)
        num_cut = self.cut(prompt, num_taken + num_tokens) - num_taken
        return num_cut if num_cut > 0 else num_tokens

    def shrink(self, num_tokens: int) -> None:
        """Limit the whole step to `num_tokens`."""
        num_taken = sum(self.pieces.values())
        self.num_tokens_left = max(0, min(self.num_tokens_left, num_tokens - num_taken))


@dataclass(slots=True)
class PromptOrder:
    """Scheduler that fills steps with prompt tokens.

    max_tokens: limit of a step. max_seqs: most prompts of a step. max_mixed_tokens: limit of a step with overtaking
    prompts, for a faster first token. chunking: allows prompts in pieces; otherwise a prompt longer than a step has a
    step of its own.
    """

    max_tokens: int
    max_seqs: int
    max_mixed_tokens: int
    chunking: bool = True
    credit: int = field(init=False)  # tokens allowed ahead of their turn
    blocked: object = field(init=False, default=None)  # prompt at its turn that cannot start
    allowance: int = field(init=False, default=0)  # rest of the credit for others while `blocked` waits

    def __post_init__(self) -> None:
        self.credit = self._max_credit

    @property
    def _max_credit(self) -> int:
        return min(self.max_tokens, self.max_mixed_tokens) // 3

    def next_step(
        self,
        prompts: Iterable[AnyPrompt],
        start: Callable[[AnyPrompt], bool],
        is_held_up: Callable[[AnyPrompt], bool] = lambda prompt: False,
        num_next: Callable[[AnyPrompt], int] = attrgetter("num_left"),
        cut: Callable[[AnyPrompt, int], int] = lambda prompt, num_tokens: num_tokens,
        *,
        num_launched: int = 0,
        most: int = 0,
    ) -> list[tuple[AnyPrompt, int]]:
        """Return the prompts of the next step, each with a number of tokens; empty when no prompt can continue.

        `start` gives a prompt all resources until its completion, or returns False when resources are short. After a
        failed start, later prompts without blocks do not start by turn: freed blocks are kept for the failed prompt.
        Only shorter prompts may overtake, with at most half as many tokens in all as the failed prompt. Prompts with
        `is_held_up` are skipped; `start` of another prompt may change `is_held_up`. With chunking, `num_next` limits
        the tokens of a prompt in the step, and `cut` shortens a chunk of so many tokens. What is cut off is for others.
        `num_launched` are the tokens of steps that are not over, `most` limits the step beyond the usual; 0: no more.
        """
        by_turn = sorted(prompts, key=turn_of)
        longest_first = sorted(by_turn, key=_length)[::-1]
        step: _Step[AnyPrompt] = _Step(
            self._budget(by_turn, num_launched, most),
            is_held_up,
            num_next if self.chunking else attrgetter("num_left"),
            cut,
        )
        waits = False
        for prompt in by_turn:
            if step.num_tokens_left <= 0 or len(step.pieces) >= self.max_seqs:
                break
            if not step.num_left(prompt):
                continue
            goes = prompt.is_started or ((prompt.has_blocks or not waits) and start(prompt))
            if not (goes or waits):
                self._let_pass(prompt)
            self._overtake(prompt, longest_first, step, start)
            num_tokens = self._piece(prompt, step, step.num_tokens_left)
            goes = goes and num_tokens > 0 and self._fits(prompt, step)
            waits |= not goes
            if goes:
                step.add(prompt, num_tokens)
            if not waits:
                self.credit = min(self._max_credit, self.credit + num_tokens // 2)
        return list(step.pieces.items())

    def _budget(self, prompts: Sequence[AnyPrompt], num_launched: int, most: int) -> int:
        """Return the limit of the next step; a lone prompt gains nothing by a short step."""
        num_tokens = num_launched + sum(prompt.num_left for prompt in prompts)
        is_short = len(prompts) > 1 and num_tokens <= SHORT_QUEUE_TOKENS
        return min(self.max_tokens, most or self.max_tokens, SHORT_STEP_TOKENS if is_short else self.max_tokens)

    def _let_pass(self, prompt: AnyPrompt) -> None:
        """Add credit while `prompt` waits at its turn: at most half of its tokens in all."""
        if self.blocked is not prompt:
            self.blocked, self.allowance = prompt, prompt.num_left // 2
        granted = min(self._max_credit - self.credit, self.allowance)
        self.credit, self.allowance = self.credit + granted, self.allowance - granted

    def _overtake(
        self,
        first: AnyPrompt,
        longest_first: list[AnyPrompt],
        step: _Step[AnyPrompt],
        start: Callable[[AnyPrompt], bool],
    ) -> None:
        """Add prompts shorter than `first`, while credit lasts and a place remains for `first`."""
        while longest_first and len(step.pieces) < max(1, self.max_seqs - 1):
            prompt = longest_first[-1]
            if prompt is first or prompt.priority > first.priority:
                return
            if step.num_left(prompt) > 0:
                # The whole rest or a good part, because scraps bring the first token no sooner.
                if self._piece(prompt, step, self._max_credit // 2) > min(self.credit, step.num_tokens_left):
                    return
                if self._fits(prompt, step) and (prompt.is_started or start(prompt)):
                    num_tokens = self._piece(prompt, step, min(self.credit, step.num_tokens_left))
                    step.add(prompt, num_tokens)
                    step.shrink(self.max_mixed_tokens)
                    self.credit -= num_tokens
            longest_first.pop()

    def _fits(self, prompt: AnyPrompt, step: _Step[AnyPrompt]) -> bool:
        if prompt not in step.pieces and len(step.pieces) >= self.max_seqs:
            return False
        return self.chunking or not step.pieces or prompt.num_left <= step.num_tokens_left

    def _piece(self, prompt: AnyPrompt, step: _Step[AnyPrompt], num_tokens: int) -> int:
        """Return at most `num_tokens` of a prompt's rest; without chunking, the whole rest."""
        return step.piece(prompt, num_tokens) if self.chunking else step.num_left(prompt)


def turn_of(prompt: Prompt) -> tuple[int, int]:
    """Return a sort key; lower is earlier."""
    return prompt.priority, prompt.turn


def _length(prompt: Prompt) -> tuple[int, int, int]:
    return prompt.priority, prompt.num_left, prompt.turn
