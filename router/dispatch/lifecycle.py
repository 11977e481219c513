"""The life of completions: queued, started, replayed, and ended exactly once.

Invariant: `active` holds every completion between submission and end, and the queue holds those without workers.
"""

import logging
from collections.abc import Callable, Sequence

from common.base.errors import RequestError
from common.settings.config import RouterSection
from router.dispatch.assignments import Assignments
from router.dispatch.completion.journey import Phase
from router.dispatch.completion.state import Completion, State
from router.dispatch.completion.summary import log_end
from router.dispatch.metrics import Metrics
from router.dispatch.retry_policy import repeated_failure
from router.dispatch.waiting_queue import WaitingQueue
from router.placement.member import Member
from router.placement.route import Route

logger = logging.getLogger(__name__)


class Lifecycle:
    """Moves completions from state to state, and keeps queue, assignments and metrics in step."""

    def __init__(
        self, limits: RouterSection, assignments: Assignments, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self.active: dict[str, Completion] = {}
        self.queue = WaitingQueue[Completion](limits)
        self.assignments, self.metrics, self.clock = assignments, metrics, clock
        self._limits = limits

    def add(self, completions: Sequence[Completion]) -> None:
        """Queue completions of an HTTP request."""
        now_s = self.clock()
        for completion in completions:
            completion.times.submitted_s = completion.times.queued_s = now_s
            self.metrics.enter(completion, Phase.QUEUED, now_s)
            self.active[completion.spec.request_id] = completion
            self.queue.add(completion)

    def start(self, completion: Completion, route: Route) -> None:
        """Send a completion to the workers of a route."""
        self.queue.take(completion)
        self.metrics.expected_tokens.inc(route.cost.num_expected)
        completion.move_to(State.PREFILLING)
        now_s = self.clock()
        self.assignments.send(completion, route, now_s)
        self.metrics.enter(completion, Phase.PREFILL, now_s)

    def current(self, request_id: str, attempt: int, worker: Member) -> Completion | None:
        """Return the completion whose current attempt is on `worker`.

        Once decoding began, only the decode worker has the attempt.
        """
        completion = self.active.get(request_id)
        if completion is None or completion.attempt.number != attempt or (route := completion.attempt.route) is None:
            return None
        is_its = worker is route.decode or (worker is route.prefill and completion.state is State.PREFILLING)
        return completion if is_its else None

    def needing(self, worker: Member) -> list[Completion]:
        """Return the completions lost without `worker`."""
        its = (c for c in self.active.values() if self.current(c.spec.request_id, c.attempt.number, worker) is not None)
        return [completion for completion in its if not completion.is_handed_over_by(worker)]

    def replay(self, completion: Completion, kind: str, reason: str) -> None:
        """Start again elsewhere with prompt and outputs so far, unless the completion has failed too often."""
        if finish_reason := completion.already_finished():
            self.assignments.cancel(completion)
            self.finish(completion, finish_reason)
        elif error := repeated_failure(completion, self._limits, reason):
            self.fail(completion, error)
        else:
            self.metrics.count_replay(completion, kind, reason)
            request_id, num_outputs = completion.spec.request_id, len(completion.output.token_ids)
            logger.warning(
                "[%s #%d] replayed after %d tokens: %s", request_id, completion.attempt.number, num_outputs, reason
            )
            self.assignments.cancel(completion)
            self.assignments.release(completion)
            completion.move_to(State.QUEUED)
            completion.begin_attempt()
            completion.times.queued_s = self.clock()
            self.metrics.enter(completion, Phase.QUEUED, completion.times.queued_s)
            self.queue.add_again(completion)

    def finish(self, completion: Completion, finish_reason: str) -> None:
        """End a completion with all its outputs."""
        completion.output.finish_reason = completion.outlet.finish(finish_reason)
        self._end(completion, State.FINISHED)

    def fail(self, completion: Completion, error: RequestError) -> None:
        """End a completion with an error."""
        self.assignments.cancel(completion)
        logger.warning("[%s #%d] failed: %s", completion.spec.request_id, completion.attempt.number, error.message)
        self._end(completion, State.FAILED, error)
        completion.outlet.fail(error)

    def abort(self, completion: Completion) -> None:
        """End a completion whose client left."""
        self.assignments.cancel(completion)
        self._end(completion, State.ABORTED)

    def run(self, completion: Completion, act: Callable[..., None], *args: object) -> None:
        """Act on a completion; a bug in the act ends only `completion`."""
        try:
            act(completion, *args)
        except Exception:  # noqa: BLE001 - it is logged
            self.fail_by_bug(completion)

    def fail_by_bug(self, completion: Completion) -> None:
        """Log the exception at hand, and end a completion."""
        logger.exception("[%s #%d] a bug ends it", completion.spec.request_id, completion.attempt.number)
        if not completion.is_terminal:
            message = "the server hit an unexpected error with this completion; its log has the reason"
            self.fail(completion, RequestError(message, code="internal_error", status=500))

    def _end(self, completion: Completion, state: State, error: RequestError | None = None) -> None:
        completion.move_to(state)
        self.queue.remove(completion)
        del self.active[completion.spec.request_id]
        now_s = self.clock()
        self.metrics.end(completion, now_s, error)
        log_end(completion, now_s, error.code if error else "")
        self.metrics.slowest.add(completion, now_s)
        self.assignments.release(completion)
