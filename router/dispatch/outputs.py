"""Tokens of workers, put in order and turned into text for the client."""

from common.wire.messages.worker import FinishReason, PromptLogprobs
from common.wire.values.output_token import OutputToken
from router.dispatch.journey import Phase
from router.dispatch.lifecycle import Lifecycle
from router.dispatch.request_state import FINISH_REASONS, Completion, Delivery, State


class Outputs:
    """Accepts outputs of completions; a replay or an end may follow from a token."""

    def __init__(self, lifecycle: Lifecycle, vocab_size: int) -> None:
        self._lifecycle, self._vocab_size = lifecycle, vocab_size
        self._assignments, self._metrics = lifecycle.assignments, lifecycle.metrics

    def accept(self, completion: Completion, output_index: int, token: OutputToken, finish: int, now_s: float) -> None:
        """Deliver a token and any held successors; hold an early token, drop a duplicate or a surplus token."""
        num_outputs = len(completion.outputs)
        if num_outputs < output_index < completion.sampling.max_tokens:
            completion.attempt.hold(output_index, token, finish, now_s)
        elif output_index == num_outputs:
            self._deliver(completion, token, finish, now_s)
            while not completion.is_terminal and (held := completion.attempt.pop(len(completion.outputs))) is not None:
                self._deliver(completion, *held, now_s)

    def take_prompt_logprobs(self, completion: Completion, told: PromptLogprobs) -> None:
        """Append log-probabilities to the prompt's log; a gap shows when an output comes."""
        log = completion.prompt_log
        if log is not None and not log.take(told, self._vocab_size):
            completion.failures.num_counted += 1
            self._lifecycle.replay(completion, "internal", "invalid log-probabilities of the prompt")

    def _deliver(self, completion: Completion, token: OutputToken, finish: int, now_s: float) -> None:
        """Log the next token, and put its text, if any, into the mailbox."""
        token_id = token.token_id
        if completion.prompt_log is not None and not completion.prompt_log.is_complete:
            completion.failures.num_counted += 1
            self._lifecycle.replay(completion, "internal", "an output came before all log-probabilities of the prompt")
            return
        if completion.prompt_only:
            self._assignments.cancel(completion)
            self._lifecycle.finish_with_rest(completion, FINISH_REASONS[FinishReason.LENGTH], "")
            return
        if not completion.takes(token, self._vocab_size) or finish > FinishReason.LENGTH:
            completion.failures.num_counted += 1
            self._lifecycle.replay(completion, "internal", f"invalid token {token_id} or finish reason {finish}")
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
            self._lifecycle.finish(completion, "stop", text)
        elif finish:
            self._assignments.withdraw(completion)
            self._lifecycle.finish_with_rest(completion, FINISH_REASONS[FinishReason(finish)], text)
        else:  # also without text, inside a character: every token has its chunk
            completion.mailbox.put(Delivery(completion.index, text, len(completion.outputs)))
