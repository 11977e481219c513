"""JSON report for the status page: workers by device, load, the last minutes, incidents.

The report has numbers and names of workers and the model, but no prompt, no text, nothing said by a client.
"""

import json
import time
from dataclasses import asdict

from common.base.json_file import JsonObject
from common.base.version import VERSION
from common.wire.messages.worker import Role
from router.base.shapes import StatusReport
from router.dispatch.completion.journey import Phase
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.metrics import Metrics
from router.observe.fleet_metrics import kv_usage
from router.observe.health import memory_use, path_report, status_of
from router.observe.history import PERIOD_S, History, Sample
from router.observe.snapshot import Snapshot, Work, snapshot_of
from router.placement.capacity import max_model_len
from router.placement.member import Member
from router.placement.readiness import state_of
from router.placement.worker_pool import WorkerPool
from router.text.model_info import ModelInfo
from router.workers.memory_servers import MemoryServer, MemoryServers

KEPT_S = 0.5
"""Age up to which a report is reused for all readers."""
MAX_PATHS = 64
"""KV paths listed individually, failed paths first."""


class StatusReporter:
    """Reporter on the router's parts; changes none."""

    def __init__(
        self,
        info: ModelInfo,
        pool: WorkerPool,
        memory_servers: MemoryServers,
        dispatcher: Dispatcher,
        metrics: Metrics,
        *,
        has_chats: bool,
    ) -> None:
        self.history = History(metrics, pool, memory_servers, dispatcher.queue_sizes)
        self._info, self._pool, self._memory_servers = info, pool, memory_servers
        self._dispatcher, self._metrics = dispatcher, metrics
        self._has_chats, self._clock = has_chats, pool.clock
        self._started_s = self._clock()
        self._body, self._made_s = b"", -KEPT_S

    def body(self) -> bytes:
        """Return the report, at most `KEPT_S` old."""
        now_s = self._clock()
        if now_s - self._made_s >= KEPT_S:
            self._body, self._made_s = json.dumps(self.report(now_s)).encode("ascii"), now_s
        return self._body

    def report(self, now_s: float) -> StatusReport:
        """Return the report of the present moment; values reported by workers are as old as `heard_s`."""
        pool, is_draining = self._pool, self._dispatcher.draining
        readiness, seen = pool.readiness, snapshot_of(self._dispatcher.active, now_s)
        paths = sorted(pool.paths, key=lambda path: not path.error)
        return {
            "version": VERSION,
            "model": self._info.name,
            "max_model_len": max_model_len(pool, self._info.max_model_len),
            "has_chats": self._has_chats,
            "now_s": time.time(),
            "up_s": round(now_s - self._started_s, 1),
            "status": status_of(readiness, draining=is_draining),
            "problems": readiness.texts,
            "queued": seen.queued,
            "queued_prompt_tokens": seen.prompt_tokens,
            "running": seen.running,
            "phases": {phase.value: seen.phases[phase] for phase in Phase},
            "kv_usage": round(kv_usage(pool, self._memory_servers), 4),
            "longest": seen.longest,
            "slowest": self._metrics.slowest.report(now_s),
            "devices": self._devices(seen, now_s),
            "kv_paths": [path_report(path, digits=1) for path in paths[:MAX_PATHS]],
            "num_kv_paths": len(paths),
            "period_s": PERIOD_S,
            "history": {name: [getattr(sample, name) for sample in self.history.samples] for name in Sample._fields},
            "incidents": [
                asdict(incident) | {"kind": incident.kind.value} for incident in reversed(list(self._metrics.incidents))
            ],
        }

    def _devices(self, seen: Snapshot, now_s: float) -> list[JsonObject]:
        """Return the devices, each with memory servers and workers.

        Members on the same GPU share a device, because device names end with the GPU's UUID.
        """
        devices: dict[str, JsonObject] = {}
        workers = list(self._pool)
        names = [each.ready.device for each in (*self._memory_servers, *workers)]
        for name in sorted(names):
            key = name.split()[-1]
            devices.setdefault(key, {"id": key, "name": name, "memory_servers": [], "workers": []})
        for server in self._memory_servers:
            device = devices[server.ready.device.split()[-1]]
            device["memory_servers"].append(_memory_server(server, workers, now_s))
        for worker in sorted(workers, key=lambda worker: worker.id):
            devices[worker.gpu]["workers"].append(self._worker(worker, seen.work[worker], now_s))
        return list(devices.values())

    def _worker(self, worker: Member, work: Work, now_s: float) -> JsonObject:
        ready, beat, pace = worker.ready, worker.beat, self.history.pace(worker.connection)
        return {
            "id": worker.id,
            "role": worker.role_name,
            "state": state_of(worker),
            "since_s": round(now_s - worker.joined_s, 1),
            "heard_s": round(now_s - worker.last_seen_s, 1),
            "version": ready.version,
            "pid": ready.pid,
            **asdict(work),
            "most_sequences": ready.max_num_seqs,
            "outstanding_prompt_tokens": worker.work.outstanding_tokens,
            "step_age_s": round(beat.last_step_age_s, 1) if beat else 0.0,
            "step_ms": None if pace.step_ms is None else round(pace.step_ms, 2),
            "tokens_per_s": round(pace.written_per_s if ready.role is Role.DECODE else pace.computed_per_s, 1),
            "busy": round(pace.busy, 3),
            "in_turns": beat is not None and beat.in_turns,
        }


def _memory_server(server: MemoryServer, workers: list[Member], now_s: float) -> JsonObject:
    return {
        "id": server.id,
        "since_s": round(now_s - server.joined_s, 1),
        "heard_s": round(now_s - server.last_seen_s, 1),
        "used_blocks": server.num_blocks_in_use(workers),
        **memory_use(server.beat, before=0),
    }
