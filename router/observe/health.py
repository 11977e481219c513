"""Health report for operators: workers, memory servers, KV paths and problems."""

from collections.abc import Iterable

from common.base.json_file import JsonObject
from common.base.version import VERSION
from common.wire.messages.memory_reports import MemoryHeartbeat
from common.wire.messages.worker import SHARED_POOL, KVPathReport, Role
from router.base.shapes import Health, StatusName
from router.placement.member import Member
from router.placement.readiness import Readiness, state_of
from router.placement.worker_pool import WorkerPool
from router.workers.memory_servers import MemoryServer
from router.workers.role_changes import RoleChanges


def report(
    pool: WorkerPool,
    memory_servers: Iterable[MemoryServer],
    role_changes: RoleChanges,
    *,
    draining: bool,
    now_s: float,
) -> Health:
    """Return the body of GET /health."""
    readiness = pool.readiness
    return {
        "version": VERSION,
        "status": status_of(readiness, draining=draining),
        "problems": readiness.texts,
        "workers": {role.name.lower(): [_worker(w, now_s) for w in pool if w.ready.role is role] for role in Role},
        "kv_paths": [path_report(path, digits=3) for path in pool.paths],
        "memory_servers": [
            _memory_server(server, pool.prefixes.reported_by(server.id), now_s) for server in memory_servers
        ],
        "role_changes": role_changes.report(now_s),
    }


def status_of(readiness: Readiness, *, draining: bool) -> StatusName:
    """Name the state shown to clients, probes and operators."""
    return "draining" if draining else readiness.status


def _worker(worker: Member, now_s: float) -> JsonObject:
    ready, beat = worker.ready, worker.beat
    return {
        **_member(worker, now_s),
        "transport": ready.transport,
        "memory_server": ready.memory_server_id,
        "state": state_of(worker),
        "draining": worker.draining,
        "standby": _standby(worker, now_s) if ready.standby else None,
        "outstanding_prompt_tokens": worker.work.outstanding_tokens,
        "assigned_sequences": worker.work.num_assigned,
        "most_sequences": ready.max_num_seqs,
        "num_running": beat.num_running if beat else None,
        "num_waiting": beat.num_waiting if beat else None,
        "num_handoffs": beat.num_handoffs if beat else None,
        "used_blocks": worker.num_used_blocks if beat else None,
        "blocks": worker.num_blocks,
        "last_step_age_s": round(beat.last_step_age_s, 3) if beat else None,
    }


def _member(member: Member | MemoryServer, now_s: float) -> JsonObject:
    """Return the fields common to workers and memory servers."""
    ready = member.ready
    return {
        "id": member.id,
        "epoch": f"{ready.epoch:x}",
        "pid": ready.pid,
        "version": ready.version,
        "since_s": round(now_s - member.joined_s, 1),
        "device": ready.device,
        "heartbeat_age_s": round(now_s - member.last_seen_s, 3),
    }


def _standby(worker: Member, now_s: float) -> JsonObject:
    need = worker.need
    return {
        "stands_by_for": worker.ready.standby,
        "in_reserve": worker.in_reserve,
        "needed_for_s": round(now_s - need.since_s, 3) if need else None,
        "needed_since": need.cause if need else None,
    }


def _memory_server(server: MemoryServer, known: tuple[int, int] | None, now_s: float) -> JsonObject:
    beat = server.beat
    return {
        **_member(server, now_s),
        **memory_use(beat, before=None),
        "free_blocks": beat.num_free_blocks if beat else None,
        "known_blocks": known[0] if known else None,
        "offered_blocks": beat.num_offered_blocks if beat else None,
        "known_host_blocks": known[1] if known else None,
        "restored_blocks": beat.num_restored_blocks if beat else None,
        "workers": list(beat.worker_ids) if beat else None,
    }


def memory_use(beat: MemoryHeartbeat | None, before: int | None) -> JsonObject:
    """Return a memory server's use of memory and GPU; `before` is each number before the first heartbeat."""
    return {
        "weights_bytes": beat.weights_bytes if beat else before,
        "free_bytes": beat.free_bytes if beat else before,
        "blocks": beat.num_blocks if beat else before,
        "cached_blocks": beat.num_cached_blocks if beat else before,
        "quarantined_blocks": beat.num_quarantined_blocks if beat else before,
        "host_blocks": beat.num_host_blocks if beat else before,
        "host_bytes": beat.host_bytes if beat else before,
        "gpu_percent": _reading(beat.gpu_percent) if beat else None,
        "gpu_celsius": _reading(beat.gpu_celsius) if beat else None,
    }


def _reading(value: int) -> int | None:
    """Return a reading, or None for an unknown reading, which is negative."""
    return value if value >= 0 else None


def path_report(path: KVPathReport, digits: int) -> JsonObject:
    """Return a KV path for GET /health and the status page; `digits` rounds the speed."""
    return {
        "prefill": path.prefill_worker_id,
        "decode": path.worker_id,
        "transport": path.transport,
        "gb_per_s": None if path.transport == SHARED_POOL else round(path.gb_per_s, digits),
        "error": path.error,
    }
