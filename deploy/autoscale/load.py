"""How busy each role was in a window of time, from what a router tells of its workers."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from common.wire.messages.operator import LoadReport, WorkerLoad
from common.wire.messages.worker import Role


@dataclass(frozen=True, slots=True)
class Sample:
    """One report, and when it came: seconds of a clock that never goes back."""

    at_s: float
    report: LoadReport

    @property
    def serving(self) -> list[WorkerLoad]:
        """Those that new requests may go to."""
        return [worker for worker in self.report.workers if worker.is_serving]

    @property
    def crew(self) -> frozenset[tuple[str, int]]:
        """Which incarnations those are."""
        return frozenset((worker.name, worker.incarnation) for worker in self.serving)

    def is_complete(self, ours: Collection[str]) -> bool:
        """Whether all workers of that name serve, and all who serve have told how they are."""
        serving = self.serving
        return {worker.name for worker in serving} >= set(ours) and all(worker.has_spoken for worker in serving)


@dataclass(frozen=True, slots=True)
class Window:
    """What all workers of a role did together, on average over a time in which nobody came or went."""

    seconds: float
    num_prompts: float  # in the router's queue, or sent to a prefill worker and without a first token
    num_busy: float  # prefill workers that were computing
    num_rows: float  # sequences that decode workers had, those among them whose blocks were on their way
    used_blocks: Mapping[int, float]  # by pool, whoever used them
    step_s: float  # of a decode step; 0 without one


def measured(samples: Sequence[Sample]) -> Window:
    """Of two samples at least, complete ones of one crew."""
    seconds = samples[-1].at_s - samples[0].at_s
    passed = [later.at_s - sooner.at_s for sooner, later in pairwise(samples)]

    def mean(values: Sequence[float]) -> float:
        """By how long each was the last that was heard; the first ends nothing."""
        return sum(value * span for value, span in zip(values[1:], passed, strict=True)) / seconds

    used = [_used_blocks(sample) for sample in samples]
    return Window(
        seconds=seconds,
        num_prompts=mean([_num_prompts(sample) for sample in samples]),
        num_busy=_num_busy(samples[0], samples[-1]),
        num_rows=mean([sum(worker.num_rows for worker in _of(sample, Role.DECODE)) for sample in samples]),
        used_blocks={pool_id: mean([each[pool_id] for each in used]) for pool_id in used[-1]},
        step_s=_step_s(samples[0], samples[-1]),
    )


def _of(sample: Sample, role: Role) -> list[WorkerLoad]:
    return [worker for worker in sample.serving if worker.role is role]


def _num_prompts(sample: Sample) -> int:
    return sample.report.num_queued + sum(worker.num_prompts for worker in _of(sample, Role.PREFILL))


def _used_blocks(sample: Sample) -> Counter[int]:
    used = Counter[int]()
    for worker in sample.report.workers:
        used[worker.pool_id] += worker.num_used_blocks
    return used


def _grown(first: Sample, last: Sample, role: Role) -> list[tuple[int, int]]:
    """Of each worker: steps, and the microseconds that those took."""
    before = {worker.name: worker for worker in _of(first, role)}
    return [
        (worker.num_steps - before[worker.name].num_steps, worker.step_us - before[worker.name].step_us)
        for worker in _of(last, role)
    ]


def _num_busy(first: Sample, last: Sample) -> float:
    """A worker computes one step after the other, so at most one is busy for the time of each."""
    seconds = last.at_s - first.at_s
    return sum(min(1.0, step_us / 1e6 / seconds) for _, step_us in _grown(first, last, Role.PREFILL))


def _step_s(first: Sample, last: Sample) -> float:
    grown = _grown(first, last, Role.DECODE)
    return sum(step_us for _, step_us in grown) / 1e6 / max(1, sum(num_steps for num_steps, _ in grown))
