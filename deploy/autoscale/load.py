"""Load of each role in a time window, computed from the router's reports on its workers."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from common.wire.messages.operator import LoadReport, WorkerLoad
from common.wire.messages.worker import Role


@dataclass(frozen=True, slots=True)
class Sample:
    """A load report with its time of arrival, in seconds of a monotonic clock."""

    at_s: float
    report: LoadReport

    @property
    def serving(self) -> list[WorkerLoad]:
        """Workers that may get new requests."""
        return [worker for worker in self.report.workers if worker.is_serving]

    @property
    def crew(self) -> frozenset[tuple[str, int]]:
        """Incarnations of the serving workers."""
        return frozenset((worker.name, worker.incarnation) for worker in self.serving)

    def is_complete(self, ours: Collection[str]) -> bool:
        """Tell whether all workers in `ours` serve, and all serving workers have reported."""
        serving = self.serving
        return {worker.name for worker in serving} >= set(ours) and all(worker.has_spoken for worker in serving)


@dataclass(frozen=True, slots=True)
class Window:
    """Work of all workers of each role, averaged over a time without a change of workers."""

    seconds: float
    num_prompts: float  # queued, or sent to a prefill worker without a first token yet
    num_busy: float  # busy prefill workers
    num_rows: float  # sequences of decode workers, including handoffs
    used_blocks: Mapping[int, float]  # by pool, used by any worker
    step_s: float  # of a decode step; 0: no step


def measured(samples: Sequence[Sample]) -> Window:
    """Average at least two complete samples of a single crew."""
    seconds = samples[-1].at_s - samples[0].at_s
    passed = [later.at_s - sooner.at_s for sooner, later in pairwise(samples)]

    def mean(values: Sequence[float]) -> float:
        """Weight each value by the time before; there is no time before the first."""
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
    """Return for each worker the steps between two samples, and their microseconds."""
    before = {worker.name: worker for worker in _of(first, role)}
    return [
        (worker.num_steps - before[worker.name].num_steps, worker.step_us - before[worker.name].step_us)
        for worker in _of(last, role)
    ]


def _num_busy(first: Sample, last: Sample) -> float:
    """Return the number of busy workers; a worker counts at most once, because steps run one after the other."""
    seconds = last.at_s - first.at_s
    return sum(min(1.0, step_us / 1e6 / seconds) for _, step_us in _grown(first, last, Role.PREFILL))


def _step_s(first: Sample, last: Sample) -> float:
    grown = _grown(first, last, Role.DECODE)
    return sum(step_us for _, step_us in grown) / 1e6 / max(1, sum(num_steps for num_steps, _ in grown))
