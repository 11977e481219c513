"""Tokens chosen by steps: logged, checked against grammars, and sent.

chosen ──append──▶ in the token log ──▶ reported, with finish reason ──flush──▶ sent
                      └─under a grammar─▶ held ──handle_answers: accepted──▲
"""

from collections.abc import Iterable

from common.grammar.sequence_grammars import SequenceGrammars
from common.kernels.base.sampling_operands import NO_CHOICE
from common.serving.prompts.token_ids import finish_reason, no_choice
from common.wire.messages.token_columns import TokenColumns
from common.wire.messages.worker import FinishReason
from common.wire.transport.router_link import RouterLink
from common.wire.values.output_token import OutputToken
from decode_worker.cancellation import Cancellation
from decode_worker.grammar_masks import MaskMemory
from decode_worker.sequences.sealing import Sealing
from decode_worker.sequences.sequence import DecodeSequence


class Outputs:
    """Outputs of all sequences."""

    def __init__(
        self,
        link: RouterLink,
        cancellation: Cancellation,
        sealing: Sealing,
        grammars: SequenceGrammars[DecodeSequence],
        masks: MaskMemory,
    ) -> None:
        self.link, self.scheduler, self.cancellation = link, cancellation.scheduler, cancellation
        self.sealing, self.grammars, self.masks = sealing, grammars, masks
        self.columns = TokenColumns()  # reported, not sent yet

    def append(self, chosen: Iterable[tuple[DecodeSequence, list[OutputToken]]]) -> None:
        """Log and report the tokens chosen by a step, of each sequence up to its end; seal full blocks."""
        sequences = []
        for sequence, tokens in chosen:
            sequences.append(sequence)
            self._append(sequence, tokens)
        self.sealing.seal(sequences)

    def _append(self, sequence: DecodeSequence, tokens: list[OutputToken]) -> None:
        for token in tokens:
            if sequence.ended:
                return
            if token.token_id == NO_CHOICE:
                self.cancellation.fail(sequence, *no_choice(has_grammar=sequence.grammar is not None))
                return
            sequence.token_ids.append(token.token_id)
            sequence.num_outputs += 1
            reason = finish_reason(token.token_id, sequence.num_outputs, sequence.request.sampling)
            if sequence.grammar is not None and self.grammars.hold(sequence, token, reason):
                sequence.mask_slot.num_late = 0
            else:
                self._report(sequence, token, reason)

    def handle_answers(self) -> None:
        """Handle answers of grammars: publish masks, and report held tokens."""
        for sequence, held, problem, code in self.grammars.take():
            self.masks.publish(sequence)
            if problem:
                self.cancellation.fail(sequence, code, problem)
            elif held is not None:
                self._report(sequence, *held)

    def flush(self) -> None:
        """Send reported tokens in a single message."""
        if self.columns:
            self.link.send(self.columns.batch(*self.link.worker))
            self.columns = TokenColumns()

    def _report(self, sequence: DecodeSequence, token: OutputToken, reason: FinishReason) -> None:
        """Report the last token, and end the sequence if finished."""
        request = sequence.request
        self.columns.add(request.request_id, request.attempt, sequence.num_outputs - 1, token, reason)
        if reason is not FinishReason.NOT_FINISHED:
            self.scheduler.end(sequence)
