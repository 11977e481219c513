"""What who runs a system asks of its router; the rules are those of `messages`.

An operator connects as a worker does, so that only this user can, or who knows the secret. It speaks in its own name.
"""

from dataclasses import dataclass

from common.wire.fields import Count, Epoch, Text, WorkerId


@dataclass(frozen=True, slots=True)
class DrainWanted:
    """operator -> router: let that worker or memory server finish what it has, and end. Answered by `DrainAnswer`.

    Asked again and again it tells how far that is. `incarnation`: of which start, so that who comes after it stays; 0
    is whoever is there.
    """

    operator_id: WorkerId
    epoch: Epoch
    name: WorkerId  # of the worker or memory server
    incarnation: Epoch


@dataclass(frozen=True, slots=True)
class DrainAnswer:
    """router -> operator: who has that name now; an `incarnation` of 0 says that nobody has."""

    name: WorkerId
    incarnation: Epoch
    num_requests: Count  # that need it


@dataclass(frozen=True, slots=True)
class Leave:
    """router -> worker, memory server: finish what you have, and end, as when told by a signal."""

    reason: Text


OperatorMessage = DrainWanted | DrainAnswer | Leave
