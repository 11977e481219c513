"""Workers' reports about completions: tokens, put in order and handed on, and failures."""

from common.base.errors import ErrorCode
from common.wire.messages.token_columns import rows_of
from common.wire.messages.worker import Abort, FinishReason, PromptCached, PromptLogprobs, RequestFailed, TokenBatch
from common.wire.values.output_token import OutputToken
from router.dispatch.assignments import Send
from router.dispatch.completion.attempt import PROVING_TOKENS
from router.dispatch.completion.journey import Phase
from router.dispatch.completion.state import FINISH_REASONS, Completion, State
from router.dispatch.lifecycle import Lifecycle
from router.dispatch.retry_policy import count_failure, final_error
from router.dispatch.scheduler import Scheduler
from router.placement.worker_pool import WorkerPool

LAST_REASON = int(FinishReason.LENGTH)


class WorkerReports:
    """Handlers of messages about completions; a replay or an end may follow from a message.

    Each handler takes the identity of the worker's connection and the message.
    """

    def __init__(
        self, lifecycle: Lifecycle, scheduler: Scheduler, pool: WorkerPool, send: Send, vocab_size: int
    ) -> None:
        self._lifecycle, self._scheduler, self._pool, self._send = lifecycle, scheduler, pool, send
        self._assignments, self._metrics, self._vocab_size = lifecycle.assignments, lifecycle.metrics, vocab_size

    def on_tokens(self, _: bytes, batch: TokenBatch) -> None:
        """Deliver tokens of a step; raises ValueError for malformed columns."""
        rows = list(rows_of(batch))
        worker = self._pool.get(batch.worker_id, batch.epoch)
        if worker is None:
            self._metrics.stale_tokens.inc(len(rows))
            return
        lifecycle, now_s = self._lifecycle, self._lifecycle.clock()
        for request_id, attempt, output_index, token, finish in rows:
            completion = lifecycle.current(request_id, attempt, worker)
            if completion is None:
                # A worker computes for nothing here; an Abort for an ended request is harmless.
                self._metrics.stale_tokens.inc()
                self._send(worker.id, Abort(request_id, attempt))
                continue
            try:  # as `Lifecycle.run`, without a call for each token
                self._accept(completion, output_index, token, finish, now_s)
            except Exception:  # noqa: BLE001 - it is logged
                lifecycle.fail_by_bug(completion)
        self._scheduler.schedule()

    def on_prompt_logprobs(self, _: bytes, report: PromptLogprobs) -> None:
        """Keep log-probabilities of a prompt; drop any not asked for."""
        if (completion := self._completion_of(report)) is not None:
            self._lifecycle.run(completion, self._add_prompt_logprobs, report)
            self._scheduler.schedule()

    def on_cached(self, _: bytes, report: PromptCached) -> None:
        """Count prompt tokens found in a prefill worker's pool as computed, so the worker has room for more prompts."""
        if (completion := self._completion_of(report)) is not None:
            self._metrics.cached_tokens.inc(self._assignments.reduce_prompt(completion, report.num_tokens))
            self._scheduler.schedule()

    def on_failed(self, _: bytes, failed: RequestFailed) -> None:
        """Fail or replay a completion after a worker gave up the attempt."""
        worker, completion = self._pool.get(failed.worker_id, failed.epoch), self._completion_of(failed)
        if worker is None or completion is None:
            return
        if error := final_error(failed, worker, len(completion.output.token_ids)):
            self._lifecycle.fail(completion, error)
        else:
            if failed.code is ErrorCode.DRAINING:
                self._pool.drain(worker)
            count_failure(completion, worker, failed.code)
            self._lifecycle.replay(completion, failed.code.name.lower(), f"{worker.id}: {failed.message[:200]}")
        self._scheduler.schedule()

    def _completion_of(self, report: PromptLogprobs | PromptCached | RequestFailed) -> Completion | None:
        """Return the completion of a report if the reporting worker runs the reported attempt."""
        worker = self._pool.get(report.worker_id, report.epoch)
        return self._lifecycle.current(report.request_id, report.attempt, worker) if worker else None

    def _add_prompt_logprobs(self, completion: Completion, report: PromptLogprobs) -> None:
        """Append log-probabilities to the prompt's log; a gap shows when an output comes."""
        log = completion.output.prompt_log
        if log is None:
            return
        if log.take(report, self._vocab_size):
            completion.outlet.scored(report)
        else:
            self._replay_invalid(completion, "invalid log-probabilities of the prompt")

    def _accept(self, completion: Completion, output_index: int, token: OutputToken, finish: int, now_s: float) -> None:
        """Deliver a token and any held successors; hold an early token, drop a duplicate or a surplus token."""
        token_ids = completion.output.token_ids
        if output_index == len(token_ids):
            early = completion.attempt.early
            self._deliver(completion, token, finish, now_s)
            while early and len(token_ids) in early and not completion.is_terminal:
                self._deliver(completion, *early.pop(len(token_ids)), now_s)
        elif len(token_ids) < output_index < completion.spec.sampling.max_tokens:
            completion.attempt.hold(output_index, token, finish, now_s)

    def _deliver(self, completion: Completion, token: OutputToken, finish: int, now_s: float) -> None:
        """Add the next token to the outputs, and hand it to the outlet."""
        output = completion.output
        if output.prompt_log is not None and output.lacks_prompt_logprobs:
            self._replay_invalid(completion, "an output came before all log-probabilities of the prompt")
        elif completion.spec.prompt_only:
            self._assignments.cancel(completion)
            self._lifecycle.finish(completion, FINISH_REASONS[FinishReason.LENGTH])
        elif not completion.accepts(token, self._vocab_size) or finish > LAST_REASON:
            self._replay_invalid(completion, f"invalid token {token.token_id} or finish reason {finish}")
        else:
            output.token_ids.append(token.token_id)
            self._metrics.add_token(completion, now_s)
            num_outputs = len(output.token_ids)
            if completion.state is State.PREFILLING or num_outputs == completion.attempt.first_index + PROVING_TOKENS:
                self._update_progress(completion, num_outputs, now_s)
            if completion.outlet.take(token, finish):
                self._assignments.cancel(completion)
                self._lifecycle.finish(completion, FINISH_REASONS[FinishReason.STOP])
            elif finish:
                self._assignments.cancel_handoff(completion)
                self._lifecycle.finish(completion, FINISH_REASONS[FinishReason(finish)])

    def _update_progress(self, completion: Completion, num_outputs: int, now_s: float) -> None:
        """Release what an attempt's first tokens make free, and enter the next phase."""
        attempt = completion.attempt
        if num_outputs == attempt.first_index + PROVING_TOKENS:
            completion.failures.reset()
            self._assignments.prove(completion)
        if completion.state is State.PREFILLING:
            self._assignments.release_prompt(completion)
            has_decoded = attempt.has_decoded(num_outputs)
            if has_decoded:
                completion.move_to(State.DECODING)
            self._metrics.enter(completion, Phase.DECODE if has_decoded else Phase.HANDOFF, now_s)

    def _replay_invalid(self, completion: Completion, reason: str) -> None:
        """Replay a completion after a wrong report, counted against the completion."""
        completion.failures.num_counted += 1
        self._lifecycle.replay(completion, "internal", reason)
