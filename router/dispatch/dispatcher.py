"""The only owner of every request's state: takes requests from the HTTP side, and keeps the clock.

Everything here runs on the event loop without awaiting, so each method sees and leaves a consistent state. Late
binding: a completion is bound to workers only when a pair has room, so a joining worker gets a share. No fact is lost
with a worker, because the token log is here.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from functools import partial

from common.base.errors import RequestError
from common.settings.config import NetSection, RouterSection
from router.dispatch.assignments import Assignments, Send
from router.dispatch.completion.state import Completion, State
from router.dispatch.deadlines import overdue, stall, unserved
from router.dispatch.lifecycle import Lifecycle
from router.dispatch.metrics import Metrics
from router.dispatch.retry_policy import count_crash, count_stall
from router.dispatch.scheduler import MAX_AT_ONCE, Defer, Scheduler
from router.placement.capacity import most_tokens
from router.placement.member import Member
from router.placement.worker_pool import WorkerPool


class Dispatcher:
    """All completions between submission and end."""

    def __init__(
        self,
        limits: RouterSection,
        net: NetSection,
        pool: WorkerPool,
        send: Send,
        metrics: Metrics,
        defer: Defer = lambda act: act(),
    ) -> None:
        self.draining = False  # the router ends after its completions
        self.refusing = False  # new requests are refused
        self.lifecycle = Lifecycle(limits, Assignments(pool, send), metrics, pool.clock)
        self.scheduler = Scheduler(self.lifecycle.queue, pool, self.lifecycle.start, defer)
        self._limits, self._net, self._pool, self._metrics = limits, net, pool, metrics

    @property
    def active(self) -> Iterable[Completion]:
        return self.lifecycle.active.values()

    @property
    def num_active(self) -> int:
        return len(self.lifecycle.active)

    def queue_sizes(self) -> tuple[int, int, int]:
        """Return completions queued, their prompt tokens, and completions at workers."""
        queue = self.lifecycle.queue
        return len(queue), queue.num_tokens, self.num_active - len(queue)

    def admit(self, num_completions: int = 1, num_tokens: int = 0) -> None:
        """Raise RequestError when an HTTP request with `num_completions` could not be submitted now."""
        try:
            if self.refusing:
                message = "the server is shutting down; retry with another one or later"
                raise RequestError(message, code="server_draining", status=503, retry_after_s=5)
            self.lifecycle.queue.admit(num_completions, num_tokens, len(self.lifecycle.active))
        except RequestError:
            self._metrics.requests.labels("rejected").inc(num_completions)
            raise

    def prepare(self, completions: Iterable[Completion]) -> Iterator[None]:
        """Prepare completions before submission; yield between pieces of work, so that other tasks get a turn."""
        return self.lifecycle.assignments.make_block_keys(completions)

    def submit(self, completions: Sequence[Completion]) -> None:
        """Queue all completions of an HTTP request or none; raises RequestError when there is no room."""
        num_tokens = sum(len(completion.spec.prompt_ids) for completion in completions)
        self.admit(len(completions), num_tokens)
        self.lifecycle.add(completions)
        self._metrics.prompt_tokens.inc(num_tokens)
        self.scheduler.schedule()

    def abort(self, *completions: Completion) -> None:
        """End completions after the client left; no-op for completions in a terminal state."""
        wanted = [completion for completion in completions if not completion.is_terminal]
        for completion in wanted[:MAX_AT_ONCE]:
            self.lifecycle.abort(completion)
        if len(wanted) > MAX_AT_ONCE:
            self.scheduler.defer(partial(self.abort, *wanted[MAX_AT_ONCE:]))
        elif wanted:
            self.scheduler.schedule()

    def stop(self, completion: Completion) -> None:
        """Finish a completion at a stop string that was found elsewhere; no-op in a terminal state."""
        if not completion.is_terminal:
            self.lifecycle.assignments.cancel(completion)
            self.lifecycle.finish(completion, "stop")
            self.scheduler.schedule()

    def fail_all(self, error: RequestError) -> None:
        """End everything, for example when the time to drain is over."""
        for completion in list(self.active):
            self.lifecycle.fail(completion, error)

    def on_worker_lost(self, worker: Member, reason: str, unsent: Set[str] = frozenset()) -> None:
        """Replay the completions of a worker gone from the pool; requests `unsent` never reached the worker."""
        for completion in self.active:  # if the handoff was lost, too, an inquiry shows the loss
            completion.attempt.is_past_prefill |= completion.is_handed_over_by(worker)
        lost = self.lifecycle.needing(worker)
        count_crash(lost, worker, self._limits, unsent)
        for completion in lost:
            self.lifecycle.run(completion, self.lifecycle.replay, "worker_lost", f"{worker.id}: {reason}")
        self.scheduler.schedule()

    def tick(self) -> None:
        """Apply every deadline; call a few times a second."""
        now_s, longest = self.lifecycle.clock(), most_tokens(self._pool)
        for completion in list(self.active):
            self.lifecycle.run(completion, self._apply_deadlines, now_s, longest)
        self.scheduler.schedule()

    def _apply_deadlines(self, completion: Completion, now_s: float, longest: int) -> None:
        """Fail or replay a completion after too long a wait.

        Args:
            longest: most tokens of a completion for some worker; 0 when there is none.
        """
        error = overdue(completion, now_s, self._limits)
        completion.update_takers(longest, now_s)
        if error is None and completion.state is State.QUEUED and completion.times.untakable_since_s:
            error = unserved(completion, now_s, self._limits, longest, self._pool.readiness.texts)
        if error is not None:
            self.lifecycle.fail(completion, error)
        elif reason := stall(completion, now_s, self._net):
            count_stall(completion)
            self.lifecycle.replay(completion, "stalled", reason)
