"""Tokens chosen by steps: logged, checked against grammars, and sent.

chosen ──append──▶ in the token log ──▶ told, with finish reason ──flush──▶ sent
                      └─under a grammar─▶ unsent ──heed: accepted by the grammar──▲
"""

from collections.abc import Callable

from common.base.errors import ErrorCode
from common.device.steps.loop_trace import Trace
from common.kernels.base.operands import NO_CHOICE
from common.serving.prompts.token_ids import NO_CHOICE_REASON, NO_TOKEN_FOLLOWS, finish_reason
from common.wire.messages.token_columns import TokenColumns
from common.wire.messages.worker import FinishReason
from common.wire.transport.router_link import RouterLink
from common.wire.values.output_token import OutputToken
from decode_worker.arrivals.local_prompts import LocalPrompts
from decode_worker.grammar_masks import Guides
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sealing import Sealing
from decode_worker.sequences.sequence import DecodeSequence, Key


class Outputs:
    """Outputs of all sequences.

    Args:
        fail: reports a failed attempt to the router.
    """

    def __init__(
        self,
        link: RouterLink,
        scheduler: DecodeScheduler,
        sealing: Sealing,
        guides: Guides,
        local_prompts: LocalPrompts,
        trace: Trace,
        fail: Callable[[Key, ErrorCode, str], None],
    ) -> None:
        self.link, self.scheduler, self.sealing, self.guides = link, scheduler, sealing, guides
        self.local_prompts, self.trace, self.fail = local_prompts, trace, fail
        self.columns = TokenColumns()  # reported, not sent yet

    def append(self, sequence: DecodeSequence, tokens: list[OutputToken]) -> None:
        """Log and report the tokens chosen by a step, up to the end of the sequence."""
        for token in tokens:
            if sequence.ended:
                return
            if token.token_id == NO_CHOICE and sequence.follower is not None:
                self._give_up(sequence, NO_TOKEN_FOLLOWS)
                return
            if token.token_id == NO_CHOICE:
                self.scheduler.end(sequence)
                self.fail(sequence.key, ErrorCode.NO_CHOICE, NO_CHOICE_REASON)
                return
            sequence.token_ids.append(token.token_id)
            sequence.num_outputs += 1
            self.sealing.note(sequence)
            if sequence.follower is not None and token.token_id not in sequence.sampling.stop_token_ids:
                self.guides.advance(sequence, token)
            else:
                self._tell(sequence, token, finish_reason(token.token_id, sequence.num_outputs, sequence.sampling))

    def heed(self) -> None:
        """Handle answers of grammars: publish masks, and report tokens that waited."""
        for sequence, outcome in self.guides.take():
            token, sequence.unsent = sequence.unsent, None
            reason = FinishReason.NOT_FINISHED
            if token is not None:
                reason = finish_reason(token.token_id, sequence.num_outputs, sequence.sampling)
                reason = FinishReason.STOP if outcome.is_over else reason
            if token is None and outcome.is_over:
                self._give_up(sequence, "nothing can follow the text")
            elif outcome.problem and reason is FinishReason.NOT_FINISHED:
                self._give_up(sequence, outcome.problem)
            elif token is not None:
                self._tell(sequence, token, reason)

    def flush(self) -> None:
        """Send reported tokens in a single message."""
        if self.columns:
            self.link.send(self.columns.batch(self.link.ready.worker_id, self.link.ready.epoch))
            self.columns = TokenColumns()

    def _tell(self, sequence: DecodeSequence, token: OutputToken, reason: FinishReason) -> None:
        """Report the last token, and end the sequence if finished."""
        self.columns.add(sequence.request_id, sequence.attempt, sequence.num_outputs - 1, token, reason)
        if reason is not FinishReason.NOT_FINISHED:
            self.trace.meet(sequence.key)
            self.scheduler.end(sequence)

    def _give_up(self, sequence: DecodeSequence, problem: str) -> None:
        """Fail a sequence whose grammar leads nowhere."""
        if self.scheduler.active.get(sequence.key) is sequence:
            self.scheduler.end(sequence)
        else:
            self.local_prompts.abort(*sequence.key)
        self.fail(sequence.key, ErrorCode.GRAMMAR, problem)
