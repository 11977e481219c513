"""Which prompt tokens the next step computes: two thirds by turn, one third by what is left.

By turn is the order that the router made: `priority`, then `turn`, which is first come, first served and fair between
clients. By what is left is shortest remaining first, in which short prompts **overtake** long ones. For every two
tokens that are computed by turn, one may be computed ahead of its turn. So a prompt is complete after at most 1.5
times the tokens that by turn alone would have been computed until then (and a third of a step), whatever
arrives meanwhile; and a short one gets into the next step, however much waits before it.

Two orders at fixed shares, each as good as alone at its share of the speed: Purohit, Svitkina and Kumar, "Improving
Online Algorithms via ML Predictions" (NeurIPS 2018, section 3). Steps that mix pieces of long prompts with short
ones: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (OSDI 2024).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Prompt(Protocol):
    """What is asked of a prompt here; identity is its name."""

    @property
    def priority(self) -> int:
        """Lower is earlier, before everything else."""

    @property
    def turn(self) -> int:
        """Its place among prompts of one priority, lower is earlier."""

    @property
    def num_left(self) -> int:
        """Tokens to compute, above 0."""

    @property
    def is_started(self) -> bool:
        """It holds all that it needs to go on."""

    @property
    def has_blocks(self) -> bool:
        """Its blocks are its own already, so it may start although a prompt before it waits for some."""


AnyPrompt = TypeVar("AnyPrompt", bound=Prompt)


@dataclass(slots=True)
class _Step(Generic[AnyPrompt]):
    """A step that is being filled."""

    num_tokens_left: int
    is_held_up: Callable[[AnyPrompt], bool]
    pieces: dict[AnyPrompt, int] = field(default_factory=dict)

    def add(self, prompt: AnyPrompt, num_tokens: int) -> None:
        self.pieces[prompt] = self.pieces.get(prompt, 0) + num_tokens
        self.num_tokens_left -= num_tokens

    def num_left(self, prompt: AnyPrompt) -> int:
        """Tokens of the prompt that the step may have, and does not have yet."""
        return 0 if self.is_held_up(prompt) else prompt.num_left - self.pieces.get(prompt, 0)

    def shrink(self, num_tokens: int) -> None:
        """Let the whole step have no more than so many tokens."""
        num_taken = sum(self.pieces.values())
        self.num_tokens_left = max(0, min(self.num_tokens_left, num_tokens - num_taken))


@dataclass(slots=True)
class PromptOrder:
    """Fills steps.

    max_tokens: of a step. max_seqs: prompts of a step. max_mixed_tokens: of a step in which some overtake others, so
    that their tokens come sooner. chunking: whether a prompt may be computed in pieces; otherwise one that is longer
    than a step has a step of its own.
    """

    max_tokens: int
    max_seqs: int
    max_mixed_tokens: int
    chunking: bool = True
    credit: int = field(init=False)  # tokens that may be computed ahead of their turn
    blocked: object = field(init=False, default=None)  # the prompt whose turn it is, and which cannot start
    allowance: int = field(init=False, default=0)  # further tokens ahead of their turn while that one waits

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
    ) -> list[tuple[AnyPrompt, int]]:
        """Each prompt of the next step with its number of tokens; empty when none can go on.

        `start` gives a prompt what it needs and holds until it is complete; False when there is not enough of that
        now. Then none of a later turn that lacks blocks starts by turn: what comes free is kept for it, but for shorter
        ones that have half as many tokens as that one, in all. What `is_held_up`, perhaps by what has just started, is
        passed over.
        """
        by_turn = sorted(prompts, key=turn_of)
        longest_first = sorted(by_turn, key=_length)[::-1]
        step: _Step[AnyPrompt] = _Step(self.max_tokens, is_held_up)
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

    def _let_pass(self, prompt: AnyPrompt) -> None:
        """Credit while the prompt whose turn it is waits, but not for ever: half as many tokens as it has, in all."""
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
        """Add what is shorter than the prompt whose turn it is, while there is credit and a place is left for that."""
        while longest_first and len(step.pieces) < max(1, self.max_seqs - 1):
            prompt = longest_first[-1]
            if prompt is first or prompt.priority > first.priority:
                return
            if step.num_left(prompt) > 0:
                # All of it at once, or a good part: scraps would bring its token no sooner.
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
        """What is left of a prompt, or so much of it, where it may be computed in pieces."""
        return min(step.num_left(prompt), num_tokens) if self.chunking else step.num_left(prompt)


def turn_of(prompt: Prompt) -> tuple[int, int]:
    """Sort key: lower is earlier."""
    return prompt.priority, prompt.turn


def _length(prompt: Prompt) -> tuple[int, int, int]:
    return prompt.priority, prompt.num_left, prompt.turn
