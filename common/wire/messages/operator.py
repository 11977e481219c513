"""What who runs a system asks of its router; the rules are those of `messages`.

An operator connects as a worker does, so that only this user can, or who knows the secret. It speaks in its own name.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from common.wire.values.fields import Count, Epoch, Length, Positive, ProcessId, Text, Total, WorkerId
from common.wire.values.role import Role

MAX_WORKERS = 256
"""That one router has."""


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


@dataclass(frozen=True, slots=True)
class LoadWanted:
    """operator -> router: how busy is everybody? Answered by `LoadReport`."""

    operator_id: WorkerId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker, as the router knows it and as its last heartbeat said."""

    name: WorkerId
    incarnation: Epoch
    role: Role
    pid: ProcessId
    is_serving: bool  # new requests may go there
    has_spoken: bool  # without a heartbeat all that follows is 0 but `num_prompts` and `most_rows`
    num_partners: Count  # that serve, of the other role, with which it has a proven KV path
    num_prompts: Count  # sent to it, first token not seen
    num_rows: Count  # decode: sequences that it has, those among them whose blocks are on their way
    most_rows: Positive  # decode: of its batch; prefill: prompts of a step
    pool_id: Epoch  # whose blocks it uses
    num_blocks: Total  # of that pool
    num_used_blocks: Total  # that it uses itself
    num_steps: Total  # since its start, as the next
    step_us: Total  # that those took, one after the other


@dataclass(frozen=True, slots=True)
class LoadReport:
    """router -> operator: everybody's load, and how many completions wait in the router."""

    num_queued: Count
    workers: Annotated[tuple[WorkerLoad, ...], Length(0, MAX_WORKERS)]


class Stage(IntEnum):
    """How far a change of roles is."""

    BEGUN = 1
    DONE = 2
    GIVEN_UP = 3


@dataclass(frozen=True, slots=True)
class RoleChange:
    """operator -> router: a worker gives way to one of the other role, for whoever looks; changes nothing itself."""

    operator_id: WorkerId
    epoch: Epoch
    name: WorkerId  # who gives way
    successor: WorkerId
    role: Role  # of the successor
    stage: Stage
    reason: Text


OperatorMessage = DrainWanted | DrainAnswer | Leave | LoadWanted | LoadReport | RoleChange
FROM_OPERATORS = (DrainWanted, LoadWanted, RoleChange)
