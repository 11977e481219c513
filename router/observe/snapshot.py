"""Counts at one moment, of the completions that are under way, what the status page shows of them and of workers."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Any

from router.dispatch.phases import Phase
from router.dispatch.request_state import Completion
from router.dispatch.slowest import NUM_TOLD, told_of
from router.placement.member import Member


@dataclass(slots=True)
class Work:
    """Completions that a worker has or will have."""

    prompts: int = 0  # whose prompt it computes
    coming: int = 0  # that it decodes once another worker has computed the prompt
    handoffs: int = 0  # on their way into its batch
    decoding: int = 0


@dataclass(slots=True)
class Snapshot:
    """Numbers that agree: those of workers add up to those of phases, and these to all that are under way."""

    phases: Counter[Phase] = field(default_factory=Counter)
    prompt_tokens: int = 0  # of those that are queued
    work: defaultdict[Member, Work] = field(default_factory=lambda: defaultdict(Work))
    longest: list[dict[str, Any]] = field(default_factory=list)  # under way, as `told_of` tells them

    @property
    def queued(self) -> int:
        return self.phases[Phase.QUEUED]

    @property
    def running(self) -> int:
        return self.phases.total() - self.queued


def snapshot_of(active: Iterable[Completion], now_s: float) -> Snapshot:
    """Count all of them once."""
    seen, completions = Snapshot(), list(active)
    for completion in completions:
        phase = completion.phases.current
        if phase is None:
            continue
        seen.phases[phase] += 1
        if phase is Phase.QUEUED:
            seen.prompt_tokens += completion.num_tokens
        elif completion.attempt.route is not None:
            _count(seen, completion.attempt.route.prefill, completion.attempt.route.decode, phase)
    oldest = nsmallest(NUM_TOLD, completions, key=lambda completion: completion.submitted_s)
    seen.longest = [told_of(completion, now_s) for completion in oldest]
    return seen


def _count(seen: Snapshot, prefill: Member, decode: Member, phase: Phase) -> None:
    work = seen.work[decode]
    if phase is Phase.PREFILL:
        seen.work[prefill].prompts += 1
        work.coming += prefill is not decode
    elif phase is Phase.HANDOFF:
        work.handoffs += 1
    else:
        work.decoding += 1
