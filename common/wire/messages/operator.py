"""Messages between an operator and the router; `worker` has the rules for all messages.

An operator connects like a worker, so only processes of the router's user or with the secret can. Each operator uses a
name of its own.
"""

from enum import IntEnum
from typing import Annotated

from msgspec import Meta

from common.wire.messages.senders import FromOperator
from common.wire.values.fields import Count, Epoch, Positive, ProcessId, Text, Total, WireStruct, WorkerId
from common.wire.values.role import Role

MAX_WORKERS = 256
"""Most workers of a router."""


class DrainWanted(FromOperator, tag=31):
    """operator -> router: drain a worker or memory server: finish its requests, then end. Answered by `DrainAnswer`.

    Repeat the message to follow progress. `incarnation` protects a successor from being drained; 0 means the present
    incarnation.
    """

    name: WorkerId  # worker or memory server
    incarnation: Epoch


class DrainAnswer(WireStruct, tag=32):
    """router -> operator: the present owner of a name; an `incarnation` of 0 means none."""

    name: WorkerId
    incarnation: Epoch
    num_requests: Count  # bound to the worker


class Leave(WireStruct, tag=30):
    """router -> worker, memory server: finish and end, like after a signal."""

    reason: Text


class LoadWanted(FromOperator, tag=34):
    """operator -> router: ask for the load of all workers. Answered by `LoadReport`."""


class WorkerLoad(WireStruct):
    """Load of a worker, from the router's books and the worker's last heartbeat."""

    name: WorkerId
    incarnation: Epoch
    role: Role
    pid: ProcessId
    is_serving: bool  # may get new requests
    has_spoken: bool  # without a heartbeat later fields are 0, except `num_prompts` and `most_rows`
    num_partners: Count  # serving workers of the other role with a proven KV path
    num_prompts: Count  # sent to the worker, first token not seen
    num_rows: Count  # decode: sequences, with sequences whose blocks are on the way
    most_rows: Positive  # decode: rows of the batch; prefill: prompts of a step
    pool_id: Epoch
    num_blocks: Total  # size of the pool
    num_used_blocks: Total  # used by the worker itself
    num_steps: Total  # since the worker's start
    step_us: Total  # sum over `num_steps`


class LoadReport(WireStruct, tag=35):
    """router -> operator: the load of all workers, and the number of completions queued in the router."""

    num_queued: Count
    workers: Annotated[tuple[WorkerLoad, ...], Meta(max_length=MAX_WORKERS)]


class Stage(IntEnum):
    """Progress of a change of roles."""

    BEGUN = 1
    DONE = 2
    GIVEN_UP = 3


class RoleChange(FromOperator, tag=36):
    """operator -> router: a worker gives way to a worker of the other role. For display only: the router only notes."""

    name: WorkerId  # leaving worker
    successor: WorkerId
    role: Role  # successor's
    stage: Stage
    reason: Text


OperatorMessage = DrainWanted | DrainAnswer | Leave | LoadWanted | LoadReport | RoleChange
