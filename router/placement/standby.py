"""Standbys: workers ready to serve, but without requests until needed.

A standby starts with `worker.standby` = N, for N other workers of equal role and device. While N such workers can take
requests, the standby is **in reserve**. When a worker is lost, leaves or falls silent, the standby is **needed**, and
serves as an ordinary worker until enough workers are back. A standby finishes all requests it has got.

Of several standbys on a device, the first by id is needed first, and counts as a worker for the standbys after it. A
returned worker without any proven path is no help. If only standbys have proven paths, the standbys of a role are
needed, or of both roles. Load does not matter.

All decisions follow from the present workers, never from history. So the reserve is equal after deaths in any order,
and in a router just started.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from common.wire.messages.worker import Role
from router.placement.member import NO_TRANSPORT, Member, Need

logger = logging.getLogger(__name__)

IsProven = Callable[[Member, Member], bool]
"""Tells whether blocks travel from a prefill worker to a decode worker."""


class Standbys:
    """Keeper of `Member.need` for all standbys; logs every change."""

    def __init__(self, is_proven: IsProven, clock: Callable[[], float]) -> None:
        self._is_proven = is_proven
        self._clock = clock
        self.num_there = 0  # registered ones, in reserve or needed
        self.num_needed = Counter[Role]()  # needs since the router's start

    def review(self, workers: Collection[Member], cause: str) -> None:
        """Update all standbys; call after a worker came, left, fell silent or spoke again, or a path was tried.

        Args:
            cause: description of the event, for the log.
        """
        if not self.num_there:
            return
        there = [worker for worker in workers if not (worker.draining or worker.silent)]
        reserve = reserve_of(there, self._is_proven)
        for worker in there:
            if worker.ready.standby and worker.in_reserve != (worker in reserve):
                self._move(worker, cause)

    def _move(self, worker: Member, cause: str) -> None:
        if worker.in_reserve:
            worker.need = Need(self._clock(), cause)
            self.num_needed[worker.ready.role] += 1
            logger.info("%s, a standby, is needed since %s", worker, cause)
        else:
            worker.need = None
            logger.info("%s, a standby, is in reserve since %s", worker, cause)


def reserve_of(there: Collection[Member], is_proven: IsProven) -> set[Member]:
    """Return the standbys not needed, among workers open for requests."""
    surplus = _surplus(there)
    of_role = [{worker for worker in surplus if worker.ready.role is role} for role in (Role.DECODE, Role.PREFILL)]
    for reserve in (surplus, *of_role):
        if _has_pair([worker for worker in there if worker not in reserve], is_proven):
            return reserve
    return set() if _has_pair(there, is_proven) else surplus


def _surplus(there: Iterable[Member]) -> set[Member]:
    """Return the standbys for which enough other workers are there."""
    num_serving = Counter(_place(worker) for worker in there if not worker.ready.standby)
    surplus = set()
    for standby in sorted((worker for worker in there if worker.ready.standby), key=lambda worker: worker.id):
        place = _place(standby)
        if num_serving[place] >= standby.ready.standby:
            surplus.add(standby)
        else:
            num_serving[place] += 1
    return surplus


def _place(worker: Member) -> tuple[Role, str]:
    """Return role and device; workers of equal place can replace each other."""
    return worker.ready.role, worker.gpu


def _has_pair(workers: Iterable[Member], is_proven: IsProven) -> bool:
    """Tell whether some decode worker takes handoffs from some prefill worker, or takes no handoffs at all."""
    prefills = [worker for worker in workers if worker.ready.role is Role.PREFILL]
    decodes = [worker for worker in workers if worker.ready.role is Role.DECODE]
    return any(
        decode.ready.transport == NO_TRANSPORT or any(is_proven(prefill, decode) for prefill in prefills)
        for decode in decodes
    )
