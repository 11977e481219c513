"""The only owner of every request's state: queue, start, order the tokens, replay, end exactly once.

Everything here runs on the event loop without awaiting, so each method sees and leaves a consistent
state. Late binding: a completion is bound to workers only when a pair has room, so that a worker
that joins gets its share. What only a dead worker knew is never needed: the token log is here.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from itertools import islice

from common.base.errors import ErrorCode, RequestError
from common.settings.config import NetSection, RouterSection
from common.wire.messages.token_columns import rows_of
from common.wire.messages.worker import Abort, FinishReason, PromptCached, PromptLogprobs, RequestFailed, TokenBatch
from common.wire.values.output_token import OutputToken
from router.dispatch.assignments import Assignments, Send
from router.dispatch.binding import starts
from router.dispatch.completion_summary import tell_end
from router.dispatch.deadlines import overdue, stall, unserved
from router.dispatch.metrics import Metrics
from router.dispatch.phases import Phase
from router.dispatch.request_state import FINISH_REASONS, Completion, Delivery, State
from router.dispatch.retry_policy import blame, final_error, note_failure, note_stall, verdict
from router.dispatch.waiting_queue import WaitingQueue
from router.placement.capacity import most_tokens, num_prompt_gpus
from router.placement.member import Member
from router.placement.route import Route
from router.placement.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

Defer = Callable[[Callable[[], None]], object]
"""Have something called once everybody else had a turn."""
MAX_AT_ONCE = 32
"""Completions started or aborted in one turn of the event loop: 2048 would hold up all streams for 0.3 s."""


class Dispatcher:
    """All completions between submission and their end."""

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
        self.draining = False  # it ends when what it has is done
        self.refusing = False  # it takes nothing new
        self._limits, self._net, self._vocab_size = limits, net, vocab_size
        self._pool, self._send = pool, send
        self._assignments = Assignments(pool, send)
        self._metrics, self._clock, self._defer, self._pumps_later = metrics, clock, defer, False
        self._active: dict[str, Completion] = {}
        self._queue = WaitingQueue(limits)

    @property
    def active(self) -> Iterable[Completion]:
        return self._active.values()

    def find(self, request_id: str) -> Completion | None:
        return self._active.get(request_id)

    @property
    def num_active(self) -> int:
        return len(self._active)

    def needing(self, worker: Member) -> list[Completion]:
        """Completions that cannot do without that worker."""
        its = (c for c in self._active.values() if self._current(c.request_id, c.attempt.number, worker) is not None)
        return [completion for completion in its if not completion.is_handed_over_by(worker)]

    def queue_sizes(self) -> tuple[int, int, int]:
        """Completions queued, their prompt tokens, completions at workers."""
        return len(self._queue), self._queue.num_tokens, len(self._active) - len(self._queue)

    # --- from the HTTP side ---------------------------------------------------------------------

    def admit(self, num_completions: int = 1, num_tokens: int = 0) -> None:
        """Raise RequestError when an HTTP request of that many completions could not be submitted now."""
        try:
            if self.refusing:
                message = "the server is shutting down; retry with another one or later"
                raise RequestError(message, code="server_draining", status=503, retry_after_s=5)
            self._queue.admit(num_completions, num_tokens, len(self._active))
        except RequestError:
            self._metrics.requests.labels("rejected").inc(num_completions)
            raise

    def find_out(self, completions: Iterable[Completion]) -> Iterator[None]:
        """What is to be known of them before they are submitted; in steps, between which others have a turn."""
        return self._assignments.find_out(completions)

    def submit(self, completions: Sequence[Completion]) -> None:
        """Queue all completions of one HTTP request or none; raises RequestError when there is no room."""
        num_tokens = sum(len(completion.prompt_ids) for completion in completions)
        self.admit(len(completions), num_tokens)
        now_s = self._clock()
        for completion in completions:
            completion.submitted_s = completion.queued_s = now_s
            self._metrics.entered(completion, Phase.QUEUED, now_s)
            self._active[completion.request_id] = completion
            self._queue.enter(completion)
        self._metrics.prompt_tokens.inc(num_tokens)
        self.pump()

    def abort(self, *completions: Completion) -> None:
        """End them because nobody wants them any more; no-op for those that have ended."""
        wanted = [completion for completion in completions if not completion.is_terminal]
        for completion in wanted[:MAX_AT_ONCE]:
            self._assignments.cancel(completion)
            self._end(completion, State.ABORTED)
        if len(wanted) > MAX_AT_ONCE:
            self._defer(partial(self.abort, *wanted[MAX_AT_ONCE:]))
        elif wanted:
            self.pump()

    def fail_all(self, error: RequestError) -> None:
        """End everything, for example when the time to drain is over."""
        for completion in list(self._active.values()):
            self._fail(completion, error)

    # --- from the workers -----------------------------------------------------------------------

    def on_tokens(self, batch: TokenBatch) -> None:
        """Deliver one step's tokens; raises ValueError for columns that do not fit together."""
        rows = list(rows_of(batch))
        worker = self._pool.get(batch.worker_id, batch.epoch)
        if worker is None:
            self._metrics.stale_tokens.inc(len(rows))
            return
        now_s = self._clock()
        for request_id, attempt, output_index, token, finish_reason in rows:
            completion = self._current(request_id, attempt, worker)
            if completion is None:
                # What nobody waits for is work for nothing; an Abort for something ended is harmless.
                self._metrics.stale_tokens.inc()
                self._send(worker.id, Abort(request_id, attempt))
            else:
                self._act_on(completion, self._accept, output_index, token, finish_reason, now_s)
        self.pump()

    def on_prompt_logprobs(self, told: PromptLogprobs) -> None:
        """Keep what a worker tells of a prompt; what nobody asked for is dropped."""
        if (completion := self._about(told)) is not None:
            self._act_on(completion, self._take_prompt_logprobs, told)
            self.pump()

    def on_cached(self, told: PromptCached) -> None:
        """A prefill worker computes less of a prompt than it was sent, so that it has room for more."""
        if (completion := self._about(told)) is not None:
            self._metrics.cached_tokens.inc(self._assignments.lighten(completion, told.num_tokens))
            self.pump()

    def on_failed(self, failed: RequestFailed) -> None:
        """A worker gave one attempt up."""
        worker, completion = self._pool.get(failed.worker_id, failed.epoch), self._about(failed)
        if worker is None or completion is None:
            return
        if error := final_error(failed, worker, len(completion.outputs)):
            self._fail(completion, error)
        else:
            if failed.code is ErrorCode.DRAINING:
                self._pool.drain(worker)
            note_failure(completion, worker, failed.code)
            self._replay(completion, failed.code.name.lower(), f"{worker.id}: {failed.message[:200]}")
        self.pump()

    def on_worker_lost(self, worker: Member, reason: str, unsent: Set[str] = frozenset()) -> None:
        """Replay what needs that incarnation, which is no longer in the pool; requests `unsent` never got there."""
        for completion in self._active.values():  # if a handoff was lost, too, an inquiry shows it
            completion.attempt.is_past_prefill |= completion.is_handed_over_by(worker)
        lost = self.needing(worker)
        blame(lost, worker, self._limits, unsent)
        for completion in lost:
            self._act_on(completion, self._replay, "worker_lost", f"{worker.id}: {reason}")
        self.pump()

    def tick(self) -> None:
        """Apply every deadline; call a few times a second."""
        now_s, longest = self._clock(), most_tokens(self._pool)
        for completion in list(self._active.values()):
            self._act_on(completion, self._apply_deadlines, now_s, longest)
        self.pump()

    def pump(self) -> None:
        """Start what is queued, once for all that happens in a turn of the event loop: there may be much to look at."""
        if not self._pumps_later:
            self._pumps_later = True
            self._defer(self._start_some)

    # --- inside ---------------------------------------------------------------------------------

    def _start_some(self) -> None:
        """While some pair of workers has room for it; many in several turns of the loop."""
        self._pumps_later = False
        num_left = MAX_AT_ONCE
        for completion, route in islice(starts(self._queue, self._pool), MAX_AT_ONCE):
            self._start(completion, route)
            num_left -= 1
        if num_left == 0:
            self.pump()

    def _act_on(self, completion: Completion, act: Callable[..., None], *args: object) -> None:
        """Do something to one of several completions: a bug that it meets ends that one, and the others go on."""
        try:
            act(completion, *args)
        except Exception:
            logger.exception("[%s #%d] a bug ends this completion", completion.request_id, completion.attempt.number)
            if not completion.is_terminal:
                message = "the server hit an unexpected error with this completion; its log has the reason"
                self._fail(completion, RequestError(message, code="internal_error", status=500))

    def _start(self, completion: Completion, route: Route) -> None:
        self._queue.take(completion)
        self._metrics.expected_tokens.inc(route.cost.num_expected)
        completion.move_to(State.PREFILLING)
        is_backlog, now_s = self._queue.is_backlog(num_prompt_gpus(self._pool)), self._clock()
        self._assignments.begin(completion, route, now_s, is_backlog=is_backlog)
        self._metrics.entered(completion, Phase.PREFILL, now_s)

    def _about(self, told: PromptLogprobs | PromptCached | RequestFailed) -> Completion | None:
        worker = self._pool.get(told.worker_id, told.epoch)
        return self._current(told.request_id, told.attempt, worker) if worker else None

    def _current(self, request_id: str, attempt: int, worker: Member) -> Completion | None:
        """The completion that this worker runs under this attempt, if it does; once it decodes only one does."""
        completion = self._active.get(request_id)
        if completion is None or completion.attempt.number != attempt or (route := completion.attempt.route) is None:
            return None
        is_its = worker is route.decode or (worker is route.prefill and completion.state is State.PREFILLING)
        return completion if is_its else None

    def _accept(self, completion: Completion, output_index: int, token: OutputToken, finish: int, now_s: float) -> None:
        """Deliver a token and those that waited for it; hold one that is early, drop a duplicate or one too many."""
        num_outputs = len(completion.outputs)
        if num_outputs < output_index < completion.sampling.max_tokens:
            completion.attempt.hold(output_index, token, finish, now_s)
        elif output_index == num_outputs:
            self._deliver(completion, token, finish, now_s)
            while not completion.is_terminal and (held := completion.attempt.pop(len(completion.outputs))) is not None:
                self._deliver(completion, *held, now_s)

    def _deliver(self, completion: Completion, token: OutputToken, finish: int, now_s: float) -> None:
        """Log the next token, and put the text it completes, if any, into the mailbox."""
        token_id = token.token_id
        if completion.prompt_log is not None and not completion.prompt_log.is_complete:
            completion.failures.num_counted += 1
            self._replay(completion, "internal", "an output came before all log-probabilities of the prompt")
            return
        if completion.prompt_only:
            self._assignments.cancel(completion)
            self._finish_with_rest(completion, FINISH_REASONS[FinishReason.LENGTH], "")
            return
        if not completion.takes(token, self._vocab_size) or finish > FinishReason.LENGTH:
            completion.failures.num_counted += 1
            self._replay(completion, "internal", f"invalid token {token_id} or finish reason {finish}")
            return
        completion.log(token)
        self._metrics.token_arrived(completion, now_s)
        if completion.attempt.gets_on(len(completion.outputs)):
            completion.failures.forget()
            self._assignments.prove(completion)
        if completion.state is State.PREFILLING:
            self._assignments.prompt_is_over(completion)
            has_spoken = completion.attempt.decode_has_spoken(len(completion.outputs))
            if has_spoken:
                completion.move_to(State.DECODING)
            self._metrics.entered(completion, Phase.DECODE if has_spoken else Phase.HANDOFF, now_s)
        is_stop = finish == FinishReason.STOP and token_id in completion.sampling.stop_token_ids
        text = "" if is_stop and not completion.include_stop else completion.text.push(token_id)
        if completion.text.stop:
            self._assignments.cancel(completion)
            self._finish(completion, "stop", text)
        elif finish:
            self._assignments.withdraw(completion)
            self._finish_with_rest(completion, FINISH_REASONS[FinishReason(finish)], text)
        else:  # also without text, inside a character: every token has its chunk
            completion.mailbox.put(Delivery(completion.index, text, len(completion.outputs)))

    def _take_prompt_logprobs(self, completion: Completion, told: PromptLogprobs) -> None:
        """They go on where the last ended; what is missing shows when an output comes."""
        log = completion.prompt_log
        if log is not None and not log.take(told, self._vocab_size):
            completion.failures.num_counted += 1
            self._replay(completion, "internal", "invalid log-probabilities of the prompt")

    def _replay(self, completion: Completion, kind: str, reason: str) -> None:
        """Start again elsewhere with prompt and outputs so far, unless that has failed too often."""
        if finish_reason := completion.already_finished():
            self._assignments.cancel(completion)
            self._finish_with_rest(completion, finish_reason, "")
        elif error := verdict(completion, self._limits, reason):
            self._fail(completion, error)
        else:
            self._metrics.replayed(completion, kind, reason)
            told = completion.request_id, completion.attempt.number, len(completion.outputs), reason
            logger.warning("[%s #%d] replayed after %d tokens: %s", *told)
            self._assignments.cancel(completion)
            self._assignments.release(completion)
            completion.move_to(State.QUEUED)
            completion.begin_attempt()
            completion.queued_s = self._clock()
            self._metrics.entered(completion, Phase.QUEUED, completion.queued_s)
            self._queue.reenter(completion)

    def _apply_deadlines(self, completion: Completion, now_s: float, longest: int) -> None:
        """Fail or replay what has waited for too long; `longest` is what workers take, 0 when there are none."""
        error = overdue(completion, now_s, self._limits)
        completion.note_takers(longest, now_s)
        if error is None and completion.state is State.QUEUED and completion.untakable_since_s:
            error = unserved(completion, now_s, self._limits, longest, self._pool.readiness.texts)
        if error is not None:
            self._fail(completion, error)
        elif reason := stall(completion, now_s, self._net):
            note_stall(completion)
            self._replay(completion, "stalled", reason)

    def _finish_with_rest(self, completion: Completion, finish_reason: str, text: str) -> None:
        """Finish, showing what was withheld; the rest itself may complete a stop string."""
        text += completion.text.flush()
        self._finish(completion, "stop" if completion.text.stop else finish_reason, text)

    def _finish(self, completion: Completion, finish_reason: str, text: str) -> None:
        completion.finish_reason = finish_reason
        self._end(completion, State.FINISHED)
        completion.mailbox.put(Delivery(completion.index, text, len(completion.outputs), finish_reason))

    def _fail(self, completion: Completion, error: RequestError) -> None:
        self._assignments.cancel(completion)
        logger.warning("[%s #%d] failed: %s", completion.request_id, completion.attempt.number, error.message)
        self._end(completion, State.FAILED, error)
        completion.mailbox.put(Delivery(completion.index, "", error=error))

    def _end(self, completion: Completion, state: State, error: RequestError | None = None) -> None:
        completion.move_to(state)
        self._queue.discard(completion)
        del self._active[completion.request_id]
        now_s = self._clock()
        self._metrics.ended(completion, now_s, error)
        tell_end(completion, now_s, error.code if error else "")
        self._metrics.slowest.note(completion, now_s)
        self._assignments.release(completion)
