"""Whose fault it was when an attempt failed, so that a request that kills workers ends, and no other with it.

A worker's death does not tell its cause. So all that it had is replayed at once, as most workers die of
something else; what had not got on there yet is more likely to be at fault. Who is blamed for a second
death is a suspect, and tried: from its start until it gets on, its workers have nobody else who has not,
so if one dies, that was the cause. Only a trial can end a request for a death; what gets on has its
failures forgotten.
"""

from collections.abc import Sequence, Set

from common.base.errors import ErrorCode, RequestError
from common.settings.config import RouterSection
from common.wire.messages.worker import RequestFailed
from router.dispatch.request_state import Completion
from router.placement.member import Member

UNCOUNTED = frozenset({ErrorCode.PREEMPTED, ErrorCode.DRAINING, ErrorCode.NOT_HERE, ErrorCode.HANDOFF_LOST})
"""Failures that are nobody's fault: a replay after one is not held against the request."""
MAX_RETURNS = 32
"""Such replays in a row, without the request getting on, after which it is given up."""


def blame(lost: Sequence[Completion], worker: Member, limits: RouterSection, unsent: Set[str]) -> None:
    """Count the death of a worker against those of its completions that may have caused it.

    That of one that was to leave, or lived when another took its id, is nobody's fault.
    """
    has_crashed = not (worker.draining or worker.replaced)
    received = [completion for completion in lost if has_crashed and completion.request_id not in unsent]
    suspects = {completion for completion in received if completion.attempt.is_unproven} or set(received)
    most = limits.max_attempts if worker.work.has_trial else max(1, limits.max_attempts - 1)
    for completion in lost:
        if completion in suspects:
            completion.failures.num_crashes += 1
            completion.failures.num_counted = min(most, completion.failures.num_counted + 1)
        else:
            completion.failures.num_returns += 1


def final_error(failed: RequestFailed, worker: Member, num_outputs: int) -> RequestError | None:
    """The error of a completion that would fail anywhere as a worker says it did; `num_outputs`: tokens it has."""
    reason = failed.message[:200]
    match failed.code:
        case ErrorCode.NEVER_FITS:
            return RequestError(reason, code="context_length_exceeded", param="prompt")
        case ErrorCode.GRAMMAR:
            message = f"the text cannot go on by its grammar after {num_outputs} tokens: {failed.message[:400]}"
            return RequestError(message, code="grammar_dead_end")
        case ErrorCode.NO_CHOICE:
            return RequestError(f"{worker.id}: {reason}", code="no_token_to_choose", status=500)
        case _:
            return None


def note_failure(completion: Completion, worker: Member, code: ErrorCode) -> None:
    """A worker gave an attempt up, for a reason that need not hold elsewhere."""
    if code is ErrorCode.NOT_HERE:
        completion.takes_trip = True
    else:
        completion.avoided = worker
    if code in UNCOUNTED:
        completion.failures.num_returns += 1
    elif code is not ErrorCode.STANDSTILL:  # which ends with the time that a request may take
        completion.failures.num_counted += 1


def note_stall(completion: Completion) -> None:
    """Count an attempt that gets nowhere; that a message was lost is nobody's fault."""
    if completion.attempt.is_lost:
        completion.failures.num_returns += 1
    else:
        completion.failures.num_counted += 1


def verdict(completion: Completion, limits: RouterSection, reason: str) -> RequestError | None:
    """The error of a completion that has failed too often in a row to be tried again."""
    if completion.failures.num_counted >= limits.max_attempts:
        message = f"failed {completion.failures.num_counted} times (router.max_attempts), last: {reason}"
        return RequestError(message, code="internal_error", status=500)
    if completion.failures.num_returns >= MAX_RETURNS:
        message = f"given back {completion.failures.num_returns} times without getting on, last: {reason}"
        return RequestError(message, code="overloaded", status=503, retry_after_s=5)
    return None
