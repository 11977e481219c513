"""Completions that no worker has yet: bounded, first come first served.

Invariant: `num_tokens` is the sum over what is queued, and removal from anywhere costs O(1), because
a client may go away at any time.
"""

from collections import OrderedDict

from common.config import RouterSection
from common.errors import RequestError
from router.request_state import Completion

RETRY_AFTER_S = 1


class WaitingQueue:
    """The queue and its limits."""

    def __init__(self, limits: RouterSection) -> None:
        self.num_tokens = 0  # prompt tokens queued
        self._limits = limits
        self._queue: OrderedDict[str, Completion] = OrderedDict()

    def __len__(self) -> int:
        return len(self._queue)

    def admit(self, num_completions: int, num_tokens: int, num_active: int) -> None:
        """Raise RequestError unless that many more fit; 400 when they never will, 429 when not now."""
        limits = self._limits
        if num_completions > limits.max_requests:
            message = f"{num_completions} completions in one request: at most {limits.max_requests}; ask for fewer"
            raise RequestError(message, param="n")
        if num_tokens > limits.max_queued_tokens:
            message = f"{num_tokens} prompt tokens in one request: at most {limits.max_queued_tokens}; split it"
            raise RequestError(message, param="prompt")
        if num_active + num_completions > limits.max_requests:
            raise _busy(f"{num_active} completions in flight, limit {limits.max_requests}")
        if self.num_tokens + num_tokens > limits.max_queued_tokens:
            raise _busy(f"{self.num_tokens} prompt tokens queued, limit {limits.max_queued_tokens}")

    def add(self, completion: Completion, *, first: bool = False) -> None:
        """Append, or put in front what had been started before."""
        self._queue[completion.request_id] = completion
        if first:
            self._queue.move_to_end(completion.request_id, last=False)
        self.num_tokens += len(completion.prompt_ids)

    def in_order(self) -> list[Completion]:
        """The next to start first."""
        return list(self._queue.values())

    def discard(self, completion: Completion) -> None:
        """Take it out, if it is in."""
        if self._queue.pop(completion.request_id, None) is not None:
            self.num_tokens -= len(completion.prompt_ids)


def _busy(what: str) -> RequestError:
    return RequestError(
        f"the server is busy: {what}; retry after {RETRY_AFTER_S} s",
        code="rate_limit_exceeded",
        status=429,
        retry_after_s=RETRY_AFTER_S,
    )
