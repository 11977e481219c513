"""Prometheus metrics of workers, memory servers and KV paths, taken from the last heartbeats.

The metrics of a worker, memory server or KV path end with its departure.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from common.wire.messages.memory_reports import MemoryHeartbeat
from common.wire.messages.operator import Stage
from common.wire.messages.worker import Heartbeat, Role
from common.wire.values.step_counts import STEP_BOUNDS_S, STEP_BOUNDS_TOKENS, StepCounts
from router.base.shapes import StatusName
from router.dispatch.metrics import buckets_of
from router.observe.health import status_of
from router.placement.member import Member
from router.placement.readiness import Kind
from router.placement.worker_pool import WorkerPool
from router.workers.memory_servers import MemoryServers
from router.workers.role_changes import RoleChanges

QueueSizes = Callable[[], tuple[int, int, int]]
"""Completions queued, queued prompt tokens, completions at workers."""
OfWorker = Callable[[Member], float]
OfBeat = Callable[[Heartbeat], float]
OfMemory = Callable[[MemoryHeartbeat], float]
OfSteps = Callable[[StepCounts], tuple[Sequence[int], float]]
"""Steps by bucket, and the sum of all values."""

WORKER_GAUGES: dict[str, tuple[str, OfWorker]] = {
    "most_sequences": ("rows of its batch, or prompts of a step", lambda worker: worker.ready.max_num_seqs),
    "assigned_sequences": ("completions that it decodes or is to decode", lambda worker: worker.work.num_assigned),
    "outstanding_prompt_tokens": (
        "sent to it, first token not seen yet",
        lambda worker: worker.work.outstanding_tokens,
    ),
    "used_blocks": ("KV blocks of its pool that it uses", lambda worker: worker.num_used_blocks),
    "blocks": ("KV blocks of its pool, which others may share", lambda worker: worker.num_blocks),
    "draining": ("whether it finishes what it has, and leaves", lambda worker: worker.draining),
}
BEAT_GAUGES: dict[str, tuple[str, OfBeat]] = {
    "running": ("sequences in the worker's batch", lambda beat: beat.num_running),
    "paused": ("of those, paused: other sequences have their rows", lambda beat: beat.num_paused),
    "waiting": ("requests waiting in the worker", lambda beat: beat.num_waiting),
    "handoffs": ("KV handoffs under way", lambda beat: beat.num_handoffs),
    "in_turns": ("whether streams wait for its prompts, which would be late", lambda beat: beat.in_turns),
    "step_age_seconds": ("since its last step ended; 0 while idle", lambda beat: beat.last_step_age_s),
}
BEAT_COUNTERS: dict[str, tuple[str, OfBeat]] = {
    "step_sequences": ("sequences of its steps, by which one divided by steps is a batch's size",
                       lambda beat: beat.steps.num_sequences),
    "pulls": ("copies out of other pools", lambda beat: beat.pulls.num_pulls),
    "pulled_bytes": ("that those moved", lambda beat: beat.pulls.num_bytes),
    "pull_seconds": ("that those took, one after the other", lambda beat: beat.pulls.total_us / 1e6),
    "pulled_blocks": ("KV blocks pulled from other pools", lambda beat: beat.num_pulled_blocks),
    "found_blocks": ("the same, not pulled as they were there", lambda beat: beat.num_found_blocks),
    "turns": ("prompt steps for which streams waited, and decode steps beside those", lambda beat: beat.num_turns),
    "spared_bytes": ("KV that decode steps did not read, as sequences share it", lambda beat: beat.spared_bytes),
}  # fmt: skip
MEMORY_GAUGES: dict[str, tuple[str, OfMemory]] = {
    "weights_bytes": ("of weights that a memory server owns", lambda beat: beat.weights_bytes),
    "free_bytes": ("that its device has left", lambda beat: beat.free_bytes),
    "blocks": ("KV blocks of its pools", lambda beat: beat.num_blocks),
    "free_blocks": ("KV blocks of its pools, free", lambda beat: beat.num_free_blocks),
    "cached_blocks": ("of those, kept for others to begin with", lambda beat: beat.num_cached_blocks),
    "offered_blocks": ("KV blocks handed over, not taken yet", lambda beat: beat.num_offered_blocks),
    "quarantined_blocks": ("KV blocks of the dead", lambda beat: beat.num_quarantined_blocks),
    "host_blocks": ("KV blocks in its host tier", lambda beat: beat.num_host_blocks),
    "host_bytes": ("host memory of that tier, as far as it is there", lambda beat: beat.host_bytes),
    "workers": ("workers on it", lambda beat: len(beat.worker_ids)),
}
MEMORY_COUNTERS: dict[str, tuple[str, OfMemory]] = {
    "restored_blocks": ("KV blocks restored from host memory", lambda beat: beat.num_restored_blocks),
    "copied_out_bytes": ("KV blocks copied to host memory", lambda beat: beat.copied_out_bytes),
    "copied_in_bytes": ("KV blocks copied back", lambda beat: beat.copied_in_bytes),
}


class FleetMetrics(Collector):
    """Gauges of the queue, and metrics of workers, memory servers and KV paths."""

    def __init__(
        self,
        pool: WorkerPool,
        memory_servers: MemoryServers,
        role_changes: RoleChanges,
        queue_sizes: QueueSizes,
        num_dropped: Callable[[], int],
        is_draining: Callable[[], bool],
    ) -> None:
        self._pool, self._memory_servers, self._role_changes = pool, memory_servers, role_changes
        self._queue_sizes, self._num_dropped, self._is_draining = queue_sizes, num_dropped, is_draining

    def collect(self) -> Iterator[Metric]:
        num_queued, num_queued_tokens, num_running = self._queue_sizes()
        yield GaugeMetricFamily("baton_requests_queued", "completions waiting for a worker", value=num_queued)
        yield GaugeMetricFamily("baton_queued_prompt_tokens", "their prompt tokens", value=num_queued_tokens)
        yield GaugeMetricFamily("baton_requests_running", "completions at workers", value=num_running)
        usage = kv_usage(self._pool, self._memory_servers)
        yield GaugeMetricFamily("baton_kv_usage_ratio", "of all KV blocks, those in use: 1 is full", value=usage)
        yield from self._readiness()
        yield self._dropped_frames()
        yield from self._roles()
        yield self._changes()
        yield from self._worker_loads()
        yield self._steps(
            "seconds", "steps of a worker", STEP_BOUNDS_S, lambda steps: (steps.durations, steps.total_us / 1e6)
        )
        yield self._steps(
            "tokens", "tokens computed in each step", STEP_BOUNDS_TOKENS, lambda steps: (steps.sizes, steps.num_tokens)
        )
        yield self._kv_paths()
        yield from self._memory_loads()

    def _readiness(self) -> Iterator[Metric]:
        readiness = self._pool.readiness
        now = status_of(readiness, draining=self._is_draining())
        status = GaugeMetricFamily("baton_status", "1 for the state that it is in", labels=["status"])
        for name in get_args(StatusName):
            status.add_metric([name], name == now)
        problems = GaugeMetricFamily("baton_problems", "what is wrong, by kind; `/health` says it", labels=["kind"])
        for kind in Kind:
            problems.add_metric([kind.value], sum(each.num for each in readiness.problems if each.kind is kind))
        yield from (status, problems)

    def _dropped_frames(self) -> Metric:
        family = CounterMetricFamily("baton_dropped_frames", "frames dropped, by process", labels=["process"])
        family.add_metric(["router"], self._num_dropped())
        for worker in self._pool:
            family.add_metric([worker.id], worker.beat.num_dropped_frames if worker.beat else 0)
        return family

    def _roles(self) -> Iterator[Metric]:
        registered = GaugeMetricFamily("baton_workers", "registered workers", labels=["role"])
        reserve = GaugeMetricFamily("baton_workers_in_reserve", "standbys that nobody needs", labels=["role"])
        needed = CounterMetricFamily("baton_standbys_needed", "times that a standby was needed", labels=["role"])
        for role in Role:
            members = [worker for worker in self._pool if worker.ready.role is role]
            registered.add_metric([_name(role)], len(members))
            reserve.add_metric([_name(role)], sum(worker.in_reserve for worker in members))
            needed.add_metric([_name(role)], self._pool.standbys.num_needed[role])
        yield from (registered, reserve, needed)

    def _changes(self) -> Metric:
        family = CounterMetricFamily(
            "baton_role_changes",
            "workers that gave way to one of the other role, by that role",
            labels=["role", "stage"],
        )
        for role, stage in product(Role, Stage):
            family.add_metric([_name(role), stage.name.lower()], self._role_changes.num[role, stage])
        return family

    def _worker_loads(self) -> Iterator[Metric]:
        for name, (text, value) in WORKER_GAUGES.items():
            gauge = GaugeMetricFamily(f"baton_worker_{name}", text, labels=["worker", "role"])
            for worker in self._pool:
                gauge.add_metric(_labels(worker), value(worker))
            yield gauge
        for kind, values in ((GaugeMetricFamily, BEAT_GAUGES), (CounterMetricFamily, BEAT_COUNTERS)):
            for name, (text, of_beat) in values.items():
                family = kind(f"baton_worker_{name}", text, labels=["worker", "role"])
                for worker in self._pool:
                    family.add_metric(_labels(worker), of_beat(worker.beat) if worker.beat else 0.0)
                yield family

    def _steps(self, unit: str, text: str, bounds: Sequence[float], counted: OfSteps) -> Metric:
        family = HistogramMetricFamily(f"baton_worker_step_{unit}", text, labels=["worker", "role"])
        for worker in self._pool:
            if worker.beat is not None:
                counts, total = counted(worker.beat.steps)
                family.add_metric(_labels(worker), buckets_of(bounds, counts), total)
        return family

    def _kv_paths(self) -> Metric:
        family = GaugeMetricFamily(
            "baton_kv_path_bytes_per_second",
            "how KV blocks travel, and how fast when that was proven; 0: the path failed, infinity: they stay where "
            "they are",
            labels=["prefill", "decode", "transport"],
        )
        for path in self._pool.paths:
            value = 0.0 if path.error else path.gb_per_s * 1e9 or math.inf
            family.add_metric([path.prefill_worker_id, path.worker_id, path.transport], value)
        return family

    def _memory_loads(self) -> Iterator[Metric]:
        known = GaugeMetricFamily(
            "baton_memory_known_blocks", "KV blocks of which it tells by which texts they are found", labels=["server"]
        )
        parked = GaugeMetricFamily(
            "baton_memory_known_host_blocks", "the same of those that are in host memory only", labels=["server"]
        )
        for server in self._memory_servers:
            num_known, num_parked = self._pool.prefixes.reported_by(server.id) or (0, 0)
            known.add_metric([server.id], num_known)
            parked.add_metric([server.id], num_parked)
        yield from (known, parked)
        yield from self._groups()
        yield from self._gpus()
        for kind, values in ((GaugeMetricFamily, MEMORY_GAUGES), (CounterMetricFamily, MEMORY_COUNTERS)):
            for name, (text, value) in values.items():
                family = kind(f"baton_memory_{name}", text, labels=["server"])
                for server in self._memory_servers:
                    family.add_metric([server.id], value(server.beat) if server.beat else 0.0)
                yield family

    def _groups(self) -> Iterator[Metric]:
        """Yield metrics of groups of layers, which lend memory to each other; `group` is their place in the layout."""
        labels = ["server", "group", "kind"]
        used = GaugeMetricFamily(
            "baton_memory_group_used_blocks", "KV blocks of a group of layers, leased or read", labels=labels
        )
        num_bytes = GaugeMetricFamily(
            "baton_memory_group_bytes", "memory of a pool that is a group's now", labels=labels
        )
        for server in self._memory_servers:
            for number, group in enumerate(server.beat.groups if server.beat else ()):
                values = [server.id, str(number), group.kind.name.lower()]
                used.add_metric(values, group.num_used_blocks)
                num_bytes.add_metric(values, group.num_bytes)
        yield from (used, num_bytes)

    def _gpus(self) -> Iterator[Metric]:
        """Yield metrics of GPUs, for memory servers able to read the values."""
        ratio = GaugeMetricFamily(
            "baton_gpu_utilization_ratio", "of the last moments in which kernels ran", labels=["server"]
        )
        celsius = GaugeMetricFamily("baton_gpu_temperature_celsius", "of the GPU", labels=["server"])
        for server in self._memory_servers:
            if server.beat is not None and server.beat.gpu_percent >= 0:
                ratio.add_metric([server.id], server.beat.gpu_percent / 100)
            if server.beat is not None and server.beat.gpu_celsius >= 0:
                celsius.add_metric([server.id], server.beat.gpu_celsius)
        yield from (ratio, celsius)


def kv_usage(pool: Iterable[Member], memory_servers: MemoryServers) -> float:
    """Return the share of all KV blocks in use; merely cached blocks do not count."""
    workers = list(pool)
    alone = [worker for worker in workers if memory_servers.find(worker.ready.memory_server_id) is None]
    num_used = sum(server.num_blocks_in_use(workers) for server in memory_servers)
    num_used += sum(worker.num_used_blocks for worker in alone)
    num_blocks = sum(server.beat.num_blocks for server in memory_servers if server.beat)
    num_blocks += sum(worker.num_blocks for worker in alone)
    return num_used / max(1, num_blocks)


def _labels(worker: Member) -> list[str]:
    return [worker.id, worker.role_name]


def _name(role: Role) -> str:
    return role.name.lower()
