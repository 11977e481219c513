"""Masks of sequences under a grammar, and tokens waiting for the grammar's answer.

A step is launched before the last step's tokens are known. So a mask may come while the step runs: the host writes the
mask into memory read by the step's last kernels (`GrammarMasks`). A row without a mask by then gets no token and tries
again in the next step. Other rows are not affected.
"""

from common.device.steps.adjustments import NO_MASK
from common.grammar.follower import Follower, Outcome
from common.grammar.followers import Followers
from common.kernels.base.sampling_operands import GrammarMasks
from common.wire.values.output_token import OutputToken
from decode_worker.sequences.sequence import DecodeSequence


class SequenceMasks:
    """Masks and answers of grammars; never waits."""

    def __init__(self, followers: Followers[DecodeSequence], masks: GrammarMasks) -> None:
        self._followers = followers
        self._masks, self._positions = masks.masks_cpu.numpy(), masks.positions_cpu.numpy()
        self._places: dict[DecodeSequence, int] = {}

    def begin(self, sequence: DecodeSequence) -> None:
        """Ask for the tokens allowed after the outputs so far."""
        if sequence.sampling.grammar:
            sequence.follower = Follower.of(sequence.sampling)
            outputs = sequence.token_ids[len(sequence.token_ids) - sequence.num_outputs :]
            self._followers.ask(sequence, sequence.follower, outputs)

    def enter(self, sequence: DecodeSequence) -> None:
        """Give a sequence a place for masks, kept until the sequence has ended and no step may read the place."""
        if sequence.follower is None:
            return
        self._places = {s: place for s, place in self._places.items() if _reads_masks(s)}
        taken = set(self._places.values())
        place = next(place for place in range(len(self._positions)) if place not in taken)
        self._positions[place] = NO_MASK
        self._places[sequence] = sequence.place = place
        self._publish(sequence)

    def advance(self, sequence: DecodeSequence, token: OutputToken) -> None:
        """Ask for the tokens allowed after a logged token, which is sent once accepted by the grammar."""
        assert sequence.follower is not None, "it is under a grammar"
        sequence.unsent, sequence.mask, sequence.num_late = token, None, 0
        self._followers.ask(sequence, sequence.follower, [token.token_id])

    def take(self) -> list[tuple[DecodeSequence, Outcome]]:
        """Take the answers for sequences still alive; publish the masks to steps."""
        outcomes = [(sequence, outcome) for sequence, outcome in self._followers.take() if not sequence.ended]
        for sequence, outcome in outcomes:
            sequence.mask = outcome.mask
            self._publish(sequence)
        return outcomes

    def close(self) -> None:
        self._followers.close()

    def _publish(self, sequence: DecodeSequence) -> None:
        """Write the mask, then the position; processors keep the order, so a step with the position finds the mask."""
        if sequence.mask is not None and sequence.place >= 0:
            self._masks[sequence.place] = sequence.mask
            sequence.mask_position = len(sequence.token_ids)
            self._positions[sequence.place] = sequence.mask_position


def _reads_masks(sequence: DecodeSequence) -> bool:
    """Tell whether a launched or coming step may read the masks of a sequence."""
    return sequence.num_in_flight > 0 or not (sequence.ended or sequence.is_paused)
