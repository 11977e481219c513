"""Judges whether completions are answered, lists problems that keep the system from full service, and logs changes."""

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from common.wire.messages.worker import KVPathReport, Role
from router.base.shapes import StatusName
from router.placement.kv_paths import KVPaths
from router.placement.member import NO_TRANSPORT, Member

logger = logging.getLogger(__name__)

MAX_TOLD = 8
"""Problems of a kind listed individually."""
SETTLING_S = 3.0
"""Seconds a degradation must last to be logged, because workers start one by one."""


class Kind(Enum):
    """Names of problems, used by the metric `baton_problems`."""

    NO_DECODE_WORKER = "no_decode_worker"
    NO_PREFILL_WORKER = "no_prefill_worker"
    KV_PATH_UNPROVEN = "kv_path_unproven"
    KV_PATH_FAILED = "kv_path_failed"
    WORKER_SILENT = "worker_silent"
    STANDBY_NEEDED = "standby_needed"


@dataclass(frozen=True, slots=True)
class Problem:
    """A sentence about something to mend, for an operator."""

    kind: Kind
    text: str
    num: int = 1  # problems of the kind summed up here


@dataclass(frozen=True, slots=True)
class Readiness:
    """Service status and its problems; depends on the present workers alone, never on the past."""

    status: StatusName  # degraded: completions are answered, but worse than intended
    problems: tuple[Problem, ...]

    @property
    def texts(self) -> list[str]:
        return [problem.text for problem in self.problems]


@dataclass(frozen=True, slots=True)
class _Change:
    readiness: Readiness
    cause: str
    at_s: float


class ReadinessLog:
    """Logger of readiness changes; remembers the readiness logged last."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._logged = Readiness("unavailable", ())
        self._settling: _Change | None = None

    def add(self, now: Readiness, cause: str) -> None:
        """Log at once if service starts or stops; delay a degradation until `check` finds it lasting."""
        if now == self._logged:
            self._settling = None
        elif now.status == "degraded":
            at_s = self._settling.at_s if self._settling else self._clock()
            self._settling = _Change(now, cause, at_s)
        else:
            self._log(now, cause)

    def check(self) -> None:
        """Log a lasting degradation; call a few times a second."""
        settling = self._settling
        if settling is not None and self._clock() - settling.at_s >= SETTLING_S:
            self._log(settling.readiness, settling.cause)

    def _log(self, now: Readiness, cause: str) -> None:
        why = "; ".join(now.texts)
        if now.status == "ok":
            logger.info("requests are served since %s", cause)
        elif now.status == "degraded":
            logger.warning("degraded since %s: %s", cause, why)
        elif self._logged.status != "unavailable":
            limit = "they wait, for router.worker_wait_s at most"
            logger.warning("no request is served since %s; %s: %s", cause, limit, why)
        self._logged, self._settling = now, None


def readiness_of(workers: Collection[Member], paths: KVPaths) -> Readiness:
    """Judge the registered workers and the KV paths between them.

    A single serving decode worker is enough for an answer. Without a prefill worker or a KV path, a decode worker
    computes prompts itself.
    """
    decodes = [worker for worker in workers if worker.ready.role is Role.DECODE]
    if not any(worker.is_serving for worker in decodes):
        return Readiness("unavailable", (_no_decode(decodes),))
    problems = (*_no_handoffs(workers, paths), *_failed(paths.failed), *_silent(workers), *_stand_ins(workers))
    return Readiness("degraded" if problems else "ok", problems)


def state_of(worker: Member) -> str:
    """Describe a worker's availability, for people."""
    if worker.silent:
        return "silent"
    if worker.draining:
        return "leaving"
    if worker.in_reserve:
        return "in reserve"
    return "standing in" if worker.need is not None else "serving"


def _no_decode(decodes: Iterable[Member]) -> Problem:
    there = ", ".join(f"{worker.id} is {state_of(worker)}" for worker in decodes)
    text = f"no decode worker takes requests{f' ({there:.200})' if there else ''}; start one: python -m decode_worker"
    return Problem(Kind.NO_DECODE_WORKER, text)


def _no_handoffs(workers: Iterable[Member], paths: KVPaths) -> Iterable[Problem]:
    """Yield why decode workers able to take handoffs compute prompts themselves, if all do."""
    serving = [worker for worker in workers if worker.is_serving]
    decodes = [worker for worker in serving if worker.ready.role is Role.DECODE]
    prefills = [w for w in serving if w.ready.role is Role.PREFILL and w.ready.transport != NO_TRANSPORT]
    if any(worker.ready.transport == NO_TRANSPORT or paths.partners(worker) & set(prefills) for worker in decodes):
        return
    if not prefills:
        text = "no prefill worker serves: decode workers compute prompts between the tokens of others; start one: "
        yield Problem(Kind.NO_PREFILL_WORKER, f"{text}python -m prefill_worker")
    elif num_untried := len(prefills) * len(decodes) - paths.num_tried(prefills, decodes):
        prefill, decode = next((p, d) for p in prefills for d in decodes if paths.find(p, d) is None)
        text = f"the KV path from {prefill.id} to {decode.id} has not been proven yet"
        yield Problem(Kind.KV_PATH_UNPROVEN, text, num_untried)


def _failed(reports: Collection[KVPathReport]) -> Iterable[Problem]:
    for number, path in enumerate(reports):
        if number == MAX_TOLD:
            num_left = len(reports) - MAX_TOLD
            yield Problem(Kind.KV_PATH_FAILED, f"so did {num_left} more KV paths", num_left)
            return
        where = f"the KV path from {path.prefill_worker_id} to {path.worker_id} ({path.transport})"
        yield Problem(Kind.KV_PATH_FAILED, f"{where} failed: {path.error}")


def _silent(workers: Iterable[Member]) -> Iterable[Problem]:
    silent = [worker for worker in workers if worker.silent]
    if silent:
        names = ", ".join(f"{worker.role_name} worker {worker.id}" for worker in silent[:MAX_TOLD])
        text = f"nothing is heard of {names}{_and_more(silent)}: new requests go elsewhere"
        yield Problem(Kind.WORKER_SILENT, text, len(silent))


def _stand_ins(workers: Iterable[Member]) -> Iterable[Problem]:
    needed = [worker for worker in workers if worker.need is not None and not worker.draining]
    for worker in needed[:1]:
        assert worker.need is not None
        text = f"{worker.role_name} worker {worker.id}, a standby{_and_more(needed, 1)}, serves since "
        yield Problem(Kind.STANDBY_NEEDED, text + worker.need.cause, len(needed))


def _and_more(workers: Collection[Member], num_told: int = MAX_TOLD) -> str:
    return f" and {len(workers) - num_told} more" if len(workers) > num_told else ""
