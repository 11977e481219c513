"""Which workers stand by: ready for everything, and without requests until they are needed.

A standby is started with `worker.standby` = N, for N others of its role on its device. While so many can take requests
it is **in reserve**; when one of them is lost, leaves or falls silent it is **needed**, and an ordinary worker, until
they are back. What it was sent until then it finishes. Of several standbys on a device the first by id is needed first,
and counts for those behind it. A worker that is back and has met nobody yet is no help: while no path is proven but
with standbys, those of one role are needed, of both if need be. How busy anybody is does not matter.

All this follows from who is there, never from what happened before. So after any deaths in any order, and in a router
that has just started, those in reserve are the same.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from common.wire.messages.worker import Role
from router.placement.member import NO_TRANSPORT, Member, Need

logger = logging.getLogger(__name__)

IsProven = Callable[[Member, Member], bool]
"""Whether blocks travel from a prefill worker to a decode worker."""


class Standbys:
    """Keeps `Member.need` of all standbys what it has to be, and says when it changes."""

    def __init__(self, is_proven: IsProven, clock: Callable[[], float]) -> None:
        self._is_proven = is_proven
        self._clock = clock
        self.num_needed = Counter[Role]()  # how often since the start of the router

    def review(self, workers: Collection[Member], cause: str) -> None:
        """Call whenever somebody came, went, fell silent or spoke again, or a path was tried; `cause` says which."""
        if not any(worker.ready.standby for worker in workers):
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
    """The standbys among workers that may be sent to which are not needed."""
    surplus = _surplus(there)
    of_role = [{worker for worker in surplus if worker.ready.role is role} for role in (Role.DECODE, Role.PREFILL)]
    for reserve in (surplus, *of_role):
        if _has_pair([worker for worker in there if worker not in reserve], is_proven):
            return reserve
    return set() if _has_pair(there, is_proven) else surplus


def _surplus(there: Iterable[Member]) -> set[Member]:
    """The standbys for whom so many as they stand by for are there."""
    num_serving = Counter(worker.place for worker in there if not worker.ready.standby)
    surplus = set()
    for standby in sorted((worker for worker in there if worker.ready.standby), key=lambda worker: worker.id):
        if num_serving[standby.place] >= standby.ready.standby:
            surplus.add(standby)
        else:
            num_serving[standby.place] += 1
    return surplus


def _has_pair(workers: Iterable[Member], is_proven: IsProven) -> bool:
    """Whether some decode worker takes handoffs from some prefill worker, or wants none."""
    prefills = [worker for worker in workers if worker.ready.role is Role.PREFILL]
    decodes = [worker for worker in workers if worker.ready.role is Role.DECODE]
    return any(
        decode.ready.transport == NO_TRANSPORT or any(is_proven(prefill, decode) for prefill in prefills)
        for decode in decodes
    )
