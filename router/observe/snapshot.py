"""Counts of active completions at a single moment, for the status page."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import nsmallest

from common.base.json_file import JsonObject
from router.dispatch.completion.journey import Phase
from router.dispatch.completion.state import Completion
from router.dispatch.completion.summary import NUM_SLOWEST, summary_of
from router.placement.member import Member


@dataclass(slots=True)
class Work:
    """Numbers of a worker's present and coming completions."""

    prompts: int = 0  # in prefill on the worker
    coming: int = 0  # to be decoded here, after prefill on another worker
    handoffs: int = 0  # on the way into the batch
    decoding: int = 0


@dataclass(slots=True)
class Snapshot:
    """Consistent numbers: workers add up to phases, and phases to all active completions."""

    phases: Counter[Phase] = field(default_factory=Counter)
    prompt_tokens: int = 0  # of queued completions
    work: defaultdict[Member, Work] = field(default_factory=lambda: defaultdict(Work))
    longest: list[JsonObject] = field(default_factory=list)  # the oldest active completions, from `summary_of`

    @property
    def queued(self) -> int:
        return self.phases[Phase.QUEUED]

    @property
    def running(self) -> int:
        return self.phases.total() - self.queued


def snapshot_of(active: Iterable[Completion], now_s: float) -> Snapshot:
    """Count each active completion once."""
    seen, completions = Snapshot(), list(active)
    for completion in completions:
        phase = completion.times.phases.current
        if phase is None:
            continue
        seen.phases[phase] += 1
        if phase is Phase.QUEUED:
            seen.prompt_tokens += completion.num_tokens
        elif completion.attempt.route is not None:
            _count(seen, completion.attempt.route.prefill, completion.attempt.route.decode, phase)
    oldest = nsmallest(NUM_SLOWEST, completions, key=lambda completion: completion.times.submitted_s)
    seen.longest = [summary_of(completion, now_s) for completion in oldest]
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
