"""Tokens chosen by steps: logged, checked against grammars, and sent.

chosen ──append──▶ in the token log ──▶ told, with finish reason ──flush──▶ sent
                      └─under a grammar─▶ unsent ──handle_answers: accepted──▲
"""

from collections.abc import Callable

from common.base.errors import ErrorCode
from common.device.steps.loop_trace import Trace
from common.kernels.base.sampling_operands import NO_CHOICE
from common.serving.prompts.token_ids import NO_CHOICE_REASON, NO_TOKEN_FOLLOWS, finish_reason
from common.wire.messages.token_columns import TokenColumns
from common.wire.messages.worker import FinishReason
from common.wire.transport.router_link import RouterLink
from common.wire.values.output_token import OutputToken
from decode_worker.grammar_masks import SequenceMasks
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sealing import Sealing
from decode_worker.sequences.sequence import DecodeSequence


class Outputs:
    """Outputs of all sequences.

    Args:
        give_up: fails a sequence, and reports the failure to the router.
    """

    def __init__(
        self,
        link: RouterLink,
        scheduler: DecodeScheduler,
        sealing: Sealing,
        masks: SequenceMasks,
        trace: Trace,
        give_up: Callable[[DecodeSequence, ErrorCode, str], None],
    ) -> None:
        self.link, self.scheduler, self.sealing, self.masks = link, scheduler, sealing, masks
        self.trace, self.give_up = trace, give_up
        self.columns = TokenColumns()  # reported, not sent yet

    def append(self, sequence: DecodeSequence, tokens: list[OutputToken]) -> None:
        """Log and report the tokens chosen by a step, up to the end of the sequence."""
        for token in tokens:
            if sequence.ended:
                return
            if token.token_id == NO_CHOICE and sequence.follower is not None:
                self.give_up(sequence, ErrorCode.GRAMMAR, NO_TOKEN_FOLLOWS)
                return
            if token.token_id == NO_CHOICE:
                self.give_up(sequence, ErrorCode.NO_CHOICE, NO_CHOICE_REASON)
                return
            sequence.token_ids.append(token.token_id)
            sequence.num_outputs += 1
            self.sealing.add(sequence)
            if sequence.follower is not None and token.token_id not in sequence.sampling.stop_token_ids:
                self.masks.advance(sequence, token)
            else:
                self._report(sequence, token, finish_reason(token.token_id, sequence.num_outputs, sequence.sampling))

    def handle_answers(self) -> None:
        """Handle answers of grammars: publish masks, and report tokens that waited."""
        for sequence, outcome in self.masks.take():
            token, sequence.unsent = sequence.unsent, None
            reason = FinishReason.NOT_FINISHED
            if token is not None:
                reason = finish_reason(token.token_id, sequence.num_outputs, sequence.sampling)
                reason = FinishReason.STOP if outcome.is_over else reason
            if token is None and outcome.is_over:
                self.give_up(sequence, ErrorCode.GRAMMAR, "nothing can follow the text")
            elif outcome.problem and reason is FinishReason.NOT_FINISHED:
                self.give_up(sequence, ErrorCode.GRAMMAR, outcome.problem)
            elif token is not None:
                self._report(sequence, token, reason)

    def flush(self) -> None:
        """Send reported tokens in a single message."""
        if self.columns:
            self.link.send(self.columns.batch(self.link.ready.worker_id, self.link.ready.epoch))
            self.columns = TokenColumns()

    def _report(self, sequence: DecodeSequence, token: OutputToken, reason: FinishReason) -> None:
        """Report the last token, and end the sequence if finished."""
        self.columns.add(sequence.request_id, sequence.attempt, sequence.num_outputs - 1, token, reason)
        if reason is not FinishReason.NOT_FINISHED:
            self.trace.meet(sequence.key)
            self.scheduler.end(sequence)
