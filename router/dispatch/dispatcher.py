"""The only owner of every request's state: answers the HTTP side and workers, and keeps the clock.

Everything here runs on the event loop without awaiting, so each method sees and leaves a consistent state. Late
binding: a completion is bound to workers only when a pair has room, so a joining worker gets a share. No fact is lost
with a worker, because the token log is here.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from itertools import islice

from common.base.errors import ErrorCode, RequestError
from common.settings.config import NetSection, RouterSection
from common.wire.messages.token_columns import rows_of
from common.wire.messages.worker import Abort, PromptCached, PromptLogprobs, RequestFailed, TokenBatch
from router.dispatch.assignments import Assignments, Send
from router.dispatch.binding import starts
from router.dispatch.deadlines import overdue, stall, unserved
from router.dispatch.lifecycle import Lifecycle
from router.dispatch.metrics import Metrics
from router.dispatch.outputs import Outputs
from router.dispatch.request_state import Completion, State
from router.dispatch.retry_policy import blame, final_error, note_failure, note_stall
from router.placement.member import Member
from router.placement.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

Defer = Callable[[Callable[[], None]], object]
"""Schedules a call after all other tasks had a turn."""
MAX_AT_ONCE = 32
"""Completions started or aborted in a turn of the event loop: 2048 would delay streams by 0.3 s."""


class Dispatcher:
    """All completions between submission and end."""

    def __init__(
        self,
        limits: RouterSection,
        net: NetSection,
        vocab_size: int,
        pool: WorkerPool,
        send: Send,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        defer: Defer = lambda act: act(),
    ) -> None:
        self.draining = False  # the router ends after its completions
        self.refusing = False  # new requests are refused
        self._limits, self._net = limits, net
        self._pool, self._send = pool, send
        self._lifecycle = Lifecycle(limits, Assignments(pool, send), metrics, clock)
        self._outputs = Outputs(self._lifecycle, vocab_size)
        self._metrics, self._clock, self._defer, self._pumps_later = metrics, clock, defer, False

    @property
    def active(self) -> Iterable[Completion]:
        return self._lifecycle.active.values()

    def find(self, request_id: str) -> Completion | None:
        return self._lifecycle.active.get(request_id)

    @property
    def num_active(self) -> int:
        return len(self._lifecycle.active)

    def needing(self, worker: Member) -> list[Completion]:
        """Return the completions lost without `worker`."""
        return self._lifecycle.needing(worker)

    def queue_sizes(self) -> tuple[int, int, int]:
        """Return completions queued, their prompt tokens, and completions at workers."""
        queue = self._lifecycle.queue
        return len(queue), queue.num_tokens, self.num_active - len(queue)

    # --- from the HTTP side ---------------------------------------------------------------------

    def admit(self, num_completions: int = 1, num_tokens: int = 0) -> None:
        """Raise RequestError when an HTTP request with `num_completions` could not be submitted now."""
        try:
            if self.refusing:
                message = "the server is shutting down; retry with another one or later"
                raise RequestError(message, code="server_draining", status=503, retry_after_s=5)
            self._lifecycle.queue.admit(num_completions, num_tokens, len(self._lifecycle.active))
        except RequestError:
            self._metrics.requests.labels("rejected").inc(num_completions)
            raise

    def find_out(self, completions: Iterable[Completion]) -> Iterator[None]:
        """Prepare completions before submission; yield between pieces of work, so that other tasks get a turn."""
        return self._lifecycle.assignments.find_out(completions)

    def submit(self, completions: Sequence[Completion]) -> None:
        """Queue all completions of an HTTP request or none; raises RequestError when there is no room."""
        num_tokens = sum(len(completion.prompt_ids) for completion in completions)
        self.admit(len(completions), num_tokens)
        self._lifecycle.enter(completions)
        self._metrics.prompt_tokens.inc(num_tokens)
        self.pump()

    def abort(self, *completions: Completion) -> None:
        """End completions after the client left; no-op for completions in a terminal state."""
        wanted = [completion for completion in completions if not completion.is_terminal]
        for completion in wanted[:MAX_AT_ONCE]:
            self._lifecycle.abort(completion)
        if len(wanted) > MAX_AT_ONCE:
            self._defer(partial(self.abort, *wanted[MAX_AT_ONCE:]))
        elif wanted:
            self.pump()

    def fail_all(self, error: RequestError) -> None:
        """End everything, for example when the time to drain is over."""
        for completion in list(self._lifecycle.active.values()):
            self._lifecycle.fail(completion, error)

    # --- from the workers -----------------------------------------------------------------------

    def on_tokens(self, batch: TokenBatch) -> None:
        """Deliver tokens of a step; raises ValueError for malformed columns."""
        rows = list(rows_of(batch))
        worker = self._pool.get(batch.worker_id, batch.epoch)
        if worker is None:
            self._metrics.stale_tokens.inc(len(rows))
            return
        now_s = self._clock()
        for request_id, attempt, output_index, token, finish_reason in rows:
            completion = self._lifecycle.current(request_id, attempt, worker)
            if completion is None:
                # A worker computes for nothing here; an Abort for an ended request is harmless.
                self._metrics.stale_tokens.inc()
                self._send(worker.id, Abort(request_id, attempt))
            else:
                self._act_on(completion, self._outputs.accept, output_index, token, finish_reason, now_s)
        self.pump()

    def on_prompt_logprobs(self, told: PromptLogprobs) -> None:
        """Keep log-probabilities of a prompt; drop any not asked for."""
        if (completion := self._about(told)) is not None:
            self._act_on(completion, self._outputs.take_prompt_logprobs, told)
            self.pump()

    def on_cached(self, told: PromptCached) -> None:
        """Note prompt tokens found in a prefill worker's pool, so that the worker has room for more prompts."""
        if (completion := self._about(told)) is not None:
            self._metrics.cached_tokens.inc(self._lifecycle.assignments.lighten(completion, told.num_tokens))
            self.pump()

    def on_failed(self, failed: RequestFailed) -> None:
        """Fail or replay a completion after a worker gave up the attempt."""
        worker, completion = self._pool.get(failed.worker_id, failed.epoch), self._about(failed)
        if worker is None or completion is None:
            return
        if error := final_error(failed, worker, len(completion.outputs)):
            self._lifecycle.fail(completion, error)
        else:
            if failed.code is ErrorCode.DRAINING:
                self._pool.drain(worker)
            note_failure(completion, worker, failed.code)
            self._lifecycle.replay(completion, failed.code.name.lower(), f"{worker.id}: {failed.message[:200]}")
        self.pump()

    def on_worker_lost(self, worker: Member, reason: str, unsent: Set[str] = frozenset()) -> None:
        """Replay the completions of a worker gone from the pool; requests `unsent` never reached the worker."""
        for completion in self._lifecycle.active.values():  # if the handoff was lost, too, an inquiry shows the loss
            completion.attempt.is_past_prefill |= completion.is_handed_over_by(worker)
        lost = self._lifecycle.needing(worker)
        blame(lost, worker, self._limits, unsent)
        for completion in lost:
            self._act_on(completion, self._lifecycle.replay, "worker_lost", f"{worker.id}: {reason}")
        self.pump()

    def tick(self) -> None:
        """Apply every deadline; call a few times a second."""
        now_s, longest = self._clock(), self._pool.longest()
        for completion in list(self._lifecycle.active.values()):
            self._act_on(completion, self._apply_deadlines, now_s, longest)
        self.pump()

    def pump(self) -> None:
        """Start queued completions once per turn of the event loop, because a start may look at many."""
        if not self._pumps_later:
            self._pumps_later = True
            self._defer(self._start_some)

    # --- inside ---------------------------------------------------------------------------------

    def _start_some(self) -> None:
        """Start completions while some pair of workers has room, at most MAX_AT_ONCE a turn of the loop."""
        self._pumps_later = False
        num_left = MAX_AT_ONCE
        for completion, route in islice(starts(self._lifecycle.queue, self._pool), MAX_AT_ONCE):
            self._lifecycle.start(completion, route, self._pool.num_prompt_gpus())
            num_left -= 1
        if num_left == 0:
            self.pump()

    def _act_on(self, completion: Completion, act: Callable[..., None], *args: object) -> None:
        """Act on a completion; a bug in the act ends only `completion`."""
        try:
            act(completion, *args)
        except Exception:
            logger.exception("[%s #%d] a bug ends this completion", completion.request_id, completion.attempt.number)
            if not completion.is_terminal:
                message = "the server hit an unexpected error with this completion; its log has the reason"
                self._lifecycle.fail(completion, RequestError(message, code="internal_error", status=500))

    def _about(self, told: PromptLogprobs | PromptCached | RequestFailed) -> Completion | None:
        """Return the completion of a report if the reporting worker runs the reported attempt."""
        worker = self._pool.get(told.worker_id, told.epoch)
        return self._lifecycle.current(told.request_id, told.attempt, worker) if worker else None

    def _apply_deadlines(self, completion: Completion, now_s: float, longest: int) -> None:
        """Fail or replay a completion after too long a wait.

        Args:
            longest: most tokens of a completion for some worker; 0 when there is none.
        """
        error = overdue(completion, now_s, self._limits)
        completion.note_takers(longest, now_s)
        if error is None and completion.state is State.QUEUED and completion.untakable_since_s:
            error = unserved(completion, now_s, self._limits, longest, self._pool.readiness.texts)
        if error is not None:
            self._lifecycle.fail(completion, error)
        elif reason := stall(completion, now_s, self._net):
            note_stall(completion)
            self._lifecycle.replay(completion, "stalled", reason)
