"""First tokens: held back for grammars, handed off with their prompts' blocks, and sent."""

from common.base.errors import ErrorCode
from common.device.steps.loop_trace import Trace
from common.kernels.base.sampling_operands import NO_CHOICE
from common.serving.prompts.token_ids import NO_CHOICE_REASON, NO_TOKEN_FOLLOWS, finish_reason
from common.wire.messages.token_columns import TokenColumns
from common.wire.messages.worker import FinishReason
from common.wire.transport.router_link import RouterLink
from common.wire.values.output_token import OutputToken
from prefill_worker.grammar_masks import PromptMasks
from prefill_worker.handoffs import Delivery
from prefill_worker.scheduler import PromptScheduler
from prefill_worker.sequence import PromptSequence


class Outputs:
    """Ends of prompts."""

    def __init__(
        self, link: RouterLink, scheduler: PromptScheduler, delivery: Delivery, masks: PromptMasks, trace: Trace
    ) -> None:
        self.link, self.scheduler, self.delivery, self.masks, self.trace = link, scheduler, delivery, masks, trace

    def handle_answers(self) -> None:
        """Handle answers of grammars: fail lost prompts, and emit first tokens held back for a grammar."""
        answers = self.masks.take()
        for sequence, problem in answers.lost:
            if sequence in self.scheduler.ending:
                self.delivery.let_go(sequence, self.scheduler.take(sequence))
            else:
                self.scheduler.remove(*sequence.key)
            self.delivery.fail(sequence.key, ErrorCode.GRAMMAR, problem)
        self.emit(answers.taken)

    def emit(self, ended: list[tuple[PromptSequence, OutputToken, bool]]) -> None:
        """Offer blocks to decode workers, then send first tokens to the router.

        In this order, so a text with a first token at the router no longer needs the prefill worker.

        Args:
            ended: sequence, first token, and a flag: the grammar ends the text after the token.
        """
        columns, handed_off = TokenColumns(), []
        for sequence, token, is_over in ended:
            self.trace.meet(sequence.key)
            block_ids = self.scheduler.take(sequence)
            if token.token_id == NO_CHOICE:
                is_guided = sequence.follower is not None
                code = ErrorCode.GRAMMAR if is_guided else ErrorCode.NO_CHOICE
                self.delivery.fail(sequence.key, code, NO_TOKEN_FOLLOWS if is_guided else NO_CHOICE_REASON)
                self.delivery.let_go(sequence, block_ids)
                continue
            reason = finish_reason(token.token_id, sequence.num_outputs + 1, sequence.sampling)
            reason = FinishReason.STOP if is_over else reason
            columns.add(sequence.request_id, sequence.attempt, sequence.num_outputs, token, reason)
            if reason is FinishReason.NOT_FINISHED:
                handed_off.append((sequence, token.token_id, block_ids))
            else:
                self.delivery.let_go(sequence, block_ids)
        for sequence, token_id, block_ids in handed_off:
            self.delivery.hand_off(sequence, token_id, block_ids)
        if columns:
            self.link.send(columns.batch(*self.delivery.worker))
