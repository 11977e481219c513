"""Limits of waiting, as pure functions of a completion and the time.

Nothing hangs: a completion is queued, at workers with a deadline, or stalled, and each has a limit.
"""

from collections.abc import Sequence

from common.base.errors import RequestError
from common.settings.config import NetSection, RouterSection
from router.dispatch.completion.state import Completion, State


def overdue(completion: Completion, now_s: float, limits: RouterSection) -> RequestError | None:
    """Return the error of a completion older than `request_timeout_s`, or None."""
    if now_s - completion.times.submitted_s <= limits.request_timeout_s:
        return None
    return RequestError(
        f"not finished after {limits.request_timeout_s:g} s ({len(completion.output.token_ids)} tokens so far, "
        f"{completion.state.value}); ask for fewer tokens or raise router.request_timeout_s",
        code="request_timeout",
        status=504,
    )


def unserved(
    completion: Completion, now_s: float, limits: RouterSection, longest: int, missing: Sequence[str]
) -> RequestError | None:
    """Return the error of a completion queued for too long without a worker to take it, or None.

    Args:
        longest: most tokens of a completion for some worker; 0 when no pair of workers is usable.
    """
    waited_s = now_s - max(completion.times.queued_s, completion.times.untakable_since_s)
    if waited_s < limits.worker_wait_s:
        return None
    waited = f"for {waited_s:.0f} s (router.worker_wait_s = {limits.worker_wait_s:g})"
    if longest:
        return RequestError(
            f"prompt and max_tokens are {completion.spec.max_total_tokens} tokens, no worker takes more than "
            f"{longest}, nor has another joined {waited}; lower max_tokens or shorten the prompt",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return RequestError(
        f"no usable workers {waited}: " + ("; ".join(missing)[:300] or "see GET /health"),
        code="no_workers",
        status=503,
        retry_after_s=5,
    )


def stall(completion: Completion, now_s: float, net: NetSection) -> str:
    """Tell why a completion at healthy workers is stuck, because a message was lost; empty when all is well.

    A prompt may wait as long as some worker confirms that the prompt is there (see `inquiries`).
    """
    gap_s = now_s - completion.attempt.gap_since_s
    if completion.attempt.has_gap and gap_s > net.worker_timeout_s:
        return f"token {len(completion.output.token_ids)} is missing for {gap_s:.1f} s while later ones are here"
    if completion.attempt.is_lost:
        return "none of its workers has it: a message was lost"
    silence_s = now_s - max(completion.times.last_token_s, completion.attempt.started_s)
    if completion.state is State.DECODING and silence_s > net.step_timeout_s:
        return f"no token for {silence_s:.1f} s while decoding"
    if completion.state is State.PREFILLING and min(silence_s, now_s - completion.attempt.found_s) > net.step_timeout_s:
        return f"no token for {silence_s:.1f} s, and no worker says that it has the prompt"
    return ""
