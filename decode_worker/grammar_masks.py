"""Sequences under a grammar: their masks on the way to the device, and tokens that wait for their grammar's word.

A step is launched before the tokens of the last are known, so a mask comes while the step that wants it runs: it is
written into memory that the step's last kernels read (`GrammarMasks`). A row whose mask is not there by then gets no
token, and tries again in the next step; the others notice nothing.
"""

from common.device.steps.adjustments import NO_MASK
from common.grammar.follower import Follower, Outcome
from common.grammar.followers import Followers
from common.kernels.base.operands import GrammarMasks
from common.wire.values.output_token import OutputToken
from decode_worker.sequences.sequence import DecodeSequence


class Guides:
    """What is known of grammars; nothing here waits."""

    def __init__(self, followers: Followers[DecodeSequence], masks: GrammarMasks) -> None:
        self._followers = followers
        self._masks, self._positions = masks.masks_cpu.numpy(), masks.positions_cpu.numpy()
        self._places: dict[DecodeSequence, int] = {}

    def begin(self, sequence: DecodeSequence) -> None:
        """Ask what may follow the outputs so far."""
        if sequence.sampling.grammar:
            sequence.follower = Follower.of(sequence.sampling)
            outputs = sequence.token_ids[len(sequence.token_ids) - sequence.num_outputs :]
            self._followers.ask(sequence, sequence.follower, outputs)

    def enter(self, sequence: DecodeSequence) -> None:
        """Give a sequence that will get rows a place for its masks, until it ended and no step may read there."""
        if sequence.follower is None:
            return
        self._places = {s: place for s, place in self._places.items() if _reads_masks(s)}
        taken = set(self._places.values())
        place = next(place for place in range(len(self._positions)) if place not in taken)
        self._positions[place] = NO_MASK
        self._places[sequence] = sequence.place = place
        self._publish(sequence)

    def advance(self, sequence: DecodeSequence, token: OutputToken) -> None:
        """Ask what may follow a token, which is logged, and not sent before its grammar has taken it."""
        assert sequence.follower is not None, "it is under a grammar"
        sequence.unsent, sequence.mask, sequence.num_late = token, None, 0
        self._followers.ask(sequence, sequence.follower, [token.token_id])

    def take(self) -> list[tuple[DecodeSequence, Outcome]]:
        """What has become known of sequences that have not ended; their masks are where steps find them."""
        outcomes = [(sequence, outcome) for sequence, outcome in self._followers.take() if not sequence.ended]
        for sequence, outcome in outcomes:
            sequence.mask = outcome.mask
            self._publish(sequence)
        return outcomes

    def close(self) -> None:
        self._followers.close()

    def _publish(self, sequence: DecodeSequence) -> None:
        """First the mask, then the position by which a step knows that it is there: processors keep that order."""
        if sequence.mask is not None and sequence.place >= 0:
            self._masks[sequence.place] = sequence.mask
            sequence.mask_position = len(sequence.token_ids)
            self._positions[sequence.place] = sequence.mask_position


def _reads_masks(sequence: DecodeSequence) -> bool:
    """Return whether a step, launched or to come before the sequence gets another place, may read its masks."""
    return sequence.num_in_flight > 0 or not (sequence.ended or sequence.is_paused)
