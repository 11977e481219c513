"""Blame for failed attempts: a request that kills workers ends, and no other request with it.

A worker's death does not tell the cause. So all requests at the worker are replayed at once, because most deaths have
other causes. Requests without progress on the dead worker are more likely to be at fault. A request blamed for a second
death is a suspect and gets a trial. From the start of a trial until progress, the workers have no other unproven
request. So a death during a trial shows the cause. Only a trial can end a request for a death. Progress clears a
request's failures.
"""

from collections.abc import Sequence, Set

from common.base.errors import ErrorCode, RequestError
from common.settings.config import RouterSection
from common.wire.messages.worker import RequestFailed
from router.dispatch.completion.state import Completion
from router.placement.member import Member

UNCOUNTED = frozenset({ErrorCode.PREEMPTED, ErrorCode.DRAINING, ErrorCode.NOT_HERE, ErrorCode.HANDOFF_LOST})
"""Failures by no fault of the request: a replay is not counted against the request."""
MAX_RETURNS = 32
"""Uncounted replays in a row, without progress, after which the request is given up."""


def count_crash(lost: Sequence[Completion], worker: Member, limits: RouterSection, unsent: Set[str]) -> None:
    """Count the death of a worker against completions that may have caused the death.

    The end of a draining worker, or of a worker replaced under an equal id, is no completion's fault.
    """
    has_crashed = not (worker.draining or worker.replaced)
    received = [completion for completion in lost if has_crashed and completion.spec.request_id not in unsent]
    suspects = {completion for completion in received if completion.attempt.is_unproven} or set(received)
    most = limits.max_attempts if worker.work.has_trial else max(1, limits.max_attempts - 1)
    for completion in lost:
        if completion in suspects:
            completion.failures.num_crashes += 1
            completion.failures.num_counted = min(most, completion.failures.num_counted + 1)
        else:
            completion.failures.num_returns += 1


def final_error(failed: RequestFailed, worker: Member, num_outputs: int) -> RequestError | None:
    """Return the error of a completion that would fail at every worker, or None; `num_outputs`: tokens so far."""
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


def count_failure(completion: Completion, worker: Member, code: ErrorCode) -> None:
    """Count an attempt given up by a worker for a reason that need not hold elsewhere."""
    if code is ErrorCode.NOT_HERE:
        completion.takes_trip = True
    else:
        completion.avoided = worker
    if code in UNCOUNTED:
        completion.failures.num_returns += 1
    elif code is not ErrorCode.STANDSTILL:  # a standstill has no count: the request's timeout ends it
        completion.failures.num_counted += 1


def count_stall(completion: Completion) -> None:
    """Count a stuck attempt; a lost message is not the request's fault."""
    if completion.attempt.is_lost:
        completion.failures.num_returns += 1
    else:
        completion.failures.num_counted += 1


def repeated_failure(completion: Completion, limits: RouterSection, reason: str) -> RequestError | None:
    """Return the error of a completion with too many failures in a row, or None."""
    if completion.failures.num_counted >= limits.max_attempts:
        message = f"failed {completion.failures.num_counted} times (router.max_attempts), last: {reason}"
        return RequestError(message, code="internal_error", status=500)
    if completion.failures.num_returns >= MAX_RETURNS:
        message = f"given back {completion.failures.num_returns} times without getting on, last: {reason}"
        return RequestError(message, code="overloaded", status=503, retry_after_s=5)
    return None
