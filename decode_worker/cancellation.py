"""Ends of requests before their last token: aborts, failures, and the return of all requests to the router."""

from common.base.errors import ErrorCode
from common.serving.prompts.requests import Fail, is_attempt
from decode_worker.arrivals.arrivals import Arrivals
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sequence import DecodeSequence


class Cancellation:
    """Canceller of requests, decoding or on the way into the batch.

    Args:
        report: reports a failed attempt to the router.
    """

    def __init__(self, scheduler: DecodeScheduler, arrivals: Arrivals, report: Fail) -> None:
        self.scheduler, self.arrivals, self.report = scheduler, arrivals, report

    @property
    def owns_something(self) -> bool:
        """Tell whether any request that began, or any block of a request, is here."""
        arrivals, scheduler = self.arrivals, self.scheduler
        return bool(scheduler.active or scheduler.lingering or arrivals.num_handoffs or len(arrivals.local_prompts))

    def abort(self, request_id: str, attempt: int) -> None:
        """Drop every attempt up to `attempt`, after the router's abort."""
        self.arrivals.abort(request_id, attempt)
        for key in [key for key in self.scheduler.active if is_attempt(key, request_id, attempt)]:
            self.scheduler.end(self.scheduler.active[key])

    def fail(self, sequence: DecodeSequence, code: ErrorCode, reason: str) -> None:
        """Fail a sequence that decodes, or whose prompt is computed here."""
        if self.scheduler.active.get(sequence.key) is sequence:
            self.scheduler.end(sequence)
        else:
            self.arrivals.local_prompts.abort(*sequence.key)
        self.report(sequence.key, code, reason)

    def return_waiting(self, reason: str) -> None:
        """Return prompts that wait for blocks or offers to the router; neither comes any more."""
        for key in self.arrivals.take_back():
            self.report(key, ErrorCode.DRAINING, reason)

    def return_all(self) -> None:
        """Return every request to the router at the end of a drain."""
        sequences = [*self.scheduler.active.values(), *self.scheduler.reserved.values()]
        for sequence in [*sequences, *self.arrivals.drop_all()]:
            self.report(sequence.key, ErrorCode.DRAINING, "the decode worker is shutting down")

    def drop_all(self) -> None:
        """Drop every request after a restart of the router, because no client waits for the tokens."""
        for sequence in list(self.scheduler.active.values()):
            self.scheduler.end(sequence)
        self.arrivals.drop_all()
