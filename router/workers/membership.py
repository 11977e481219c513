"""Arrival, liveness and departure of workers; informs all concerned processes.

Invariant: a worker leaves the pool only here, and then requests are replayed and peers are told. A worker with another
model or tokenizer never enters.
"""

import logging
from collections.abc import Set

from common.wire.messages.memory_reports import WorkerEnded
from common.wire.messages.operator import MAX_WORKERS
from common.wire.messages.worker import (
    DecodePeer,
    Heartbeat,
    KVPathReport,
    PeerGone,
    PrefillRequest,
    Refused,
    Reregister,
    Role,
    StillBound,
    Welcome,
    WorkerGone,
    WorkerLeaving,
    WorkerReady,
)
from common.wire.messages.worker_id import connection_of
from common.wire.values.pool_shape import shown
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.incidents import Kind
from router.placement.member import NO_TRANSPORT, Member
from router.placement.worker_pool import WorkerPool, forgive_silence
from router.text.model_info import ModelInfo
from router.workers.hub import Links, SendTo, Undelivered

logger = logging.getLogger(__name__)

MAX_EXPELLED = 1000

_SHOWN = 3
"""Workers named in a message."""


class Membership:
    """Gatekeeper of the worker pool: admits and removes workers."""

    def __init__(self, links: Links, info: ModelInfo, pool: WorkerPool, dispatcher: Dispatcher) -> None:
        self._links, self._send, self._clock = links, links.send, links.clock
        self._info, self._pool, self._dispatcher = info, pool, dispatcher
        self._checked_s = self._clock()
        self._expelled: dict[bytes, str] = {}  # reason by connection of an expelled worker, which may still live

    def on_ready(self, identity: bytes, ready: WorkerReady) -> None:
        """Admit a worker, or refuse the worker with a reason."""
        expelled = self._expelled.get(connection_of(ready.worker_id, ready.epoch))
        if reason := expelled or _objection(ready, self._info, self._pool):
            logger.warning("refused %s worker %s: %s", ready.role.name.lower(), ready.worker_id, reason)
            self._send(identity, Refused(reason))
            return
        known = self._pool.find(ready.worker_id)
        if known is not None and known.epoch != ready.epoch:
            reason = f"started again as epoch {ready.epoch:x}, pid {ready.pid}"
            # A replaced worker still alive has not crashed, so its requests are not to blame.
            known.replaced = not known.silent and self._send(known.connection, Refused(_refusal(reason)))
            self._expel(known, reason)
            known = None
        self._send(identity, Welcome(self._links.router_epoch))
        if known is None:
            worker = self._pool.add(ready, self._clock())
            reserve = ", in reserve" if worker.in_reserve else ""
            server_id = ready.memory_server_id
            owner = f"memory server {server_id}" if server_id else f"its own, {ready.transport}"
            num_blocks = shown(ready.num_blocks)
            self._links.incidents.add(Kind.JOINED, f"{_named(worker)} on {ready.device}")
            logger.info("%s joined: %s, %s KV blocks of %s%s", worker, ready.device, num_blocks, owner, reserve)
            _announce(worker, self._pool, self._send)
            self._dispatcher.scheduler.schedule()

    def on_heartbeat(self, identity: bytes, heartbeat: Heartbeat) -> None:
        """Record a heartbeat; ask an unknown worker to register, and tell an expelled worker to end."""
        connection = connection_of(heartbeat.worker_id, heartbeat.epoch)
        if connection in self._expelled:
            self._send(connection, Refused(self._expelled[connection]))
        elif not self._pool.beat(heartbeat, self._clock()):
            self._send(identity, Reregister(self._links.router_epoch))

    def on_leaving(self, _: bytes, leaving: WorkerLeaving) -> None:
        """Assign nothing new to a worker, and answer with the number of completions still bound to the worker."""
        worker = self._pool.get(leaving.worker_id, leaving.epoch)
        if worker is not None:
            self._pool.drain(worker)
            self._dispatcher.scheduler.schedule()
        num_bound = len(self._dispatcher.lifecycle.needing(worker)) if worker is not None else 0
        self._send(connection_of(leaving.worker_id, leaving.epoch), StillBound(num_bound))

    def release_all(self) -> None:
        """Release all workers from waiting for requests, because the router ends."""
        for worker in self._pool:
            self._send(worker.connection, StillBound(0))

    def on_worker_gone(self, _: bytes, gone: WorkerGone) -> None:
        """Remove a worker that announced its end."""
        worker = self._pool.get(gone.worker_id, gone.epoch)
        if worker is not None:
            self._remove(worker, gone.reason[:300])

    def on_worker_ended(self, ended: WorkerEnded) -> bool:
        """Remove a worker whose process ended; False if the reporting memory server is not the worker's.

        The report mostly comes before a knock would fail. All others are knocked first, so a worker that died along
        gets no replayed request.
        """
        worker = self._pool.get(ended.ended_worker_id, ended.ended_epoch)
        if worker is None:
            return True
        if not worker.uses(ended.server_id, ended.epoch):
            return False
        for other in self._pool:
            other.silent = other.silent or not self._links.knock(other.connection)
        self._remove(worker, f"memory server {ended.server_id} saw its process end")
        return True

    def on_path(self, _: bytes, report: KVPathReport) -> None:
        """Record a working or failed KV path."""
        if not self._pool.set_path(report):
            return
        where = f"KV path {report.prefill_worker_id} -> {report.worker_id} over {report.transport}"
        if report.error:
            logger.warning("%s failed: %s", where, report.error[:300])
            self._links.incidents.add(Kind.LOST, f"{where}: {report.error}")
        else:
            logger.info("%s works%s", where, f": {report.gb_per_s:.1f} GB/s" if report.gb_per_s else "")
        self._dispatcher.scheduler.schedule()

    def on_unreachable(self, undelivered: Undelivered) -> None:
        """Remove workers with lost connections; workers still alive register again."""
        identities = {identity for identity, _ in undelivered}
        gone = [worker for worker in self._pool if worker.connection in identities]
        unsent = {message.request_id for _, message in undelivered if isinstance(message, PrefillRequest)}
        for worker in gone:
            worker.silent = True  # all first, so no lost worker gets the requests of another
        for worker in gone:
            self._remove(worker, "its connection is gone", unsent)

    def check(self) -> None:
        """Remove silent or stuck workers, and knock at all others; call a few times a second.

        The kernel closes a dead process's connection at once, so a knock fails. Streams thus move elsewhere long before
        silence would prove the death.
        """
        now_s = self._clock()
        asleep_s, self._checked_s = now_s - self._checked_s, now_s
        if asleep_s > self._links.net.worker_timeout_s / 2:
            logger.warning("the router itself stood still for %.1f s; workers get more time", asleep_s)
            forgive_silence(self._pool, now_s)
            return
        for loss in self._pool.losses(now_s):
            if loss.stuck:
                self._expel(loss.worker, loss.reason)
            else:
                self._remove(loss.worker, loss.reason)
        for worker in self._pool:
            self._links.knock(worker.connection)

    def _expel(self, worker: Member, reason: str) -> None:
        """Remove a worker that may still live; a later heartbeat is refused, so the worker ends."""
        self._expelled[worker.connection] = _refusal(reason)
        if len(self._expelled) > MAX_EXPELLED:
            del self._expelled[next(iter(self._expelled))]
        self._remove(worker, reason)

    def _remove(self, worker: Member, reason: str, unsent: Set[str] = frozenset()) -> None:
        log, how = (logger.info, "gone after leaving") if worker.draining else (logger.warning, "lost")
        num_needing = len(self._dispatcher.lifecycle.needing(worker))
        log(
            "%s is %s: %s%s", worker, how, reason, f"; completions that needed it: {num_needing}" if num_needing else ""
        )
        self._links.incidents.add(Kind.LEFT if worker.draining else Kind.LOST, f"{_named(worker)}: {reason}")
        self._pool.remove(worker)
        for other in self._pool:
            if other.ready.role is not worker.ready.role:
                self._send(other.connection, PeerGone(worker.id, worker.epoch))
        self._dispatcher.on_worker_lost(worker, reason, unsent)


def _named(worker: Member) -> str:
    return f"{worker.role_name} worker {worker.id}"


def _refusal(reason: str) -> str:
    return f"{reason}; its requests run elsewhere. Each worker needs its own worker.id"


def _objection(ready: WorkerReady, info: ModelInfo, pool: WorkerPool) -> str:
    """Return the reason against admission; empty if admitted."""
    if pool.find(ready.worker_id) is None and len(list(pool)) >= MAX_WORKERS:
        return f"{MAX_WORKERS} workers are registered, which is the limit; stop some, or start another router"
    pairs = {
        "model name": (info.name, ready.model_name),
        "model fingerprint": (info.model_fingerprint, ready.model_fingerprint),
        "tokenizer fingerprint": (info.tokenizer_fingerprint, ready.tokenizer_fingerprint),
    }
    wrong = [
        f"{what} is {there:.100}, the router's is {ours}" for what, (ours, there) in pairs.items() if ours != there
    ]
    if ready.model_name != info.name:
        wrong.append("give both the same [model]")
    elif wrong:
        others = [worker.id for worker in pool]
        alike = f", as {', '.join(others[:_SHOWN])}{' and others' * (len(others) > _SHOWN)} did" if others else ""
        wrong += [
            "the contents of files differ, or model.quantization does",
            f"this worker read {ready.model_files or 'files that it does not name'}",
            f"the router read {info.files or 'files that it does not name'}{alike}",
            "if files have changed since, restart the router and all workers, else give both the same [model]",
        ]
    return "; ".join(wrong)


def _announce(worker: Member, pool: WorkerPool, send: SendTo) -> None:
    """Tell each prefill worker about each decode worker, whichever came first."""
    others = [other for other in pool if other.ready.role is not worker.ready.role and not other.draining]
    for other in others:
        prefill, decode = (worker, other) if worker.ready.role is Role.PREFILL else (other, worker)
        if NO_TRANSPORT not in (prefill.ready.transport, decode.ready.transport):
            send(prefill.connection, DecodePeer(decode.id, decode.epoch, decode.ready.handoff_endpoint))
