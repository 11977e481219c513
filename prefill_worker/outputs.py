"""First tokens: held for grammars, handed off with their prompts' blocks, and sent."""

from collections.abc import Iterable

from common.base.errors import ErrorCode
from common.grammar.sequence_grammars import SequenceGrammars
from common.kernels.base.sampling_operands import NO_CHOICE
from common.kv.tables import held_by
from common.serving.prompts.requests import fail_request
from common.serving.prompts.scheduler import PromptScheduler
from common.serving.prompts.token_ids import finish_reason, no_choice
from common.wire.messages.token_columns import TokenColumns
from common.wire.messages.worker import FinishReason
from common.wire.transport.router_link import RouterLink
from common.wire.values.output_token import OutputToken
from prefill_worker.handoffs import Handoffs
from prefill_worker.sequence import PrefillSequence


class Outputs:
    """Ends of prompts."""

    def __init__(
        self,
        link: RouterLink,
        scheduler: PromptScheduler[PrefillSequence],
        handoffs: Handoffs,
        grammars: SequenceGrammars[PrefillSequence],
    ) -> None:
        self.link, self.scheduler, self.handoffs, self.grammars = link, scheduler, handoffs, grammars

    def handle_answers(self) -> None:
        """Handle answers of grammars: fail prompts with a problem, and emit first tokens held for a grammar."""
        accepted = []
        for sequence, held, problem, code in self.grammars.take():
            if problem:
                self._fail(sequence, code, problem)
            elif held is not None:
                accepted.append((sequence, *held))
        self._emit(accepted)

    def append(self, complete: Iterable[tuple[PrefillSequence, OutputToken]]) -> None:
        """Emit first tokens of complete prompts, unless held for a grammar."""
        chosen = []
        for sequence, token in complete:
            if token.token_id == NO_CHOICE:
                self._fail(sequence, *no_choice(has_grammar=sequence.grammar is not None))
                continue
            reason = finish_reason(token.token_id, sequence.request.num_outputs + 1, sequence.sampling)
            if not self.grammars.hold(sequence, token, reason):
                chosen.append((sequence, token, reason))
        self._emit(chosen)

    def _emit(self, chosen: list[tuple[PrefillSequence, OutputToken, FinishReason]]) -> None:
        """Offer blocks to decode workers, then send first tokens to the router.

        In this order, so a text with a first token at the router no longer needs the prefill worker.
        """
        columns = TokenColumns()
        for sequence, token, reason in chosen:
            block_ids = held_by(self.scheduler.take(sequence))
            columns.add(*sequence.key, sequence.request.num_outputs, token, reason)
            if reason is FinishReason.NOT_FINISHED:
                self.handoffs.offer(sequence, token.token_id, block_ids)
            else:
                self.handoffs.free(sequence, block_ids)
        if columns:
            self.link.send(columns.batch(*self.link.worker))

    def _fail(self, sequence: PrefillSequence, code: ErrorCode, reason: str) -> None:
        """Fail a prompt, complete or not."""
        if sequence.num_left:
            self.scheduler.remove(*sequence.key)
        else:
            self.handoffs.free(sequence, held_by(self.scheduler.take(sequence)))
        fail_request(self.link, sequence.key, code, reason)
