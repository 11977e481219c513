"""Room for HTTP requests in the queue, as a pure function: the dispatcher's law, by which fronts refuse early."""

from common.base.errors import RequestError

RETRY_AFTER_S = 1


def admit(
    num_completions: int,
    num_tokens: int,
    num_active: int,
    num_queued_tokens: int,
    max_requests: int,
    max_queued_tokens: int,
) -> None:
    """Raise RequestError unless the request fits: status 400 if too large for ever, 429 if too large now."""
    if num_completions > max_requests:
        message = f"{num_completions} completions in one request: at most {max_requests}; ask for fewer"
        raise RequestError(message, param="n")
    if num_tokens > max_queued_tokens:
        message = f"{num_tokens} prompt tokens in one request: at most {max_queued_tokens}; split it"
        raise RequestError(message, param="prompt")
    if num_active + num_completions > max_requests:
        raise busy(f"{num_active} completions in flight, limit {max_requests}")
    if num_queued_tokens + num_tokens > max_queued_tokens:
        raise busy(f"{num_queued_tokens} prompt tokens queued, limit {max_queued_tokens}")


def busy(what: str) -> RequestError:
    """Make the error for a request that would be accepted at another moment."""
    return RequestError(
        f"the server is busy: {what}; retry after {RETRY_AFTER_S} s",
        code="rate_limit_exceeded",
        status=429,
        retry_after_s=RETRY_AFTER_S,
    )
