"""Masks of sequences under a grammar, in memory read by running steps.

A step is launched before the last step's tokens are known. So a mask may come while the step runs: the host writes the
mask into memory read by the step's last kernels (`GrammarMasks`). A row without a mask by then gets no token and tries
again in the next step. Other rows are not affected.
"""

from common.device.steps.adjustments import NO_MASK
from common.kernels.base.sampling_operands import GrammarMasks
from decode_worker.sequences.sequence import DecodeSequence


class MaskMemory:
    """Places for masks, each of a single sequence."""

    def __init__(self, masks: GrammarMasks) -> None:
        self._masks, self._positions = masks.masks_cpu.numpy(), masks.positions_cpu.numpy()
        self._places: dict[DecodeSequence, int] = {}

    def enter(self, sequence: DecodeSequence) -> None:
        """Give a sequence a place, kept until the sequence has ended and no step may read the place."""
        if sequence.grammar is None:
            return
        self._places = {s: place for s, place in self._places.items() if _reads_masks(s)}
        taken = set(self._places.values())
        place = next(place for place in range(len(self._positions)) if place not in taken)
        self._positions[place] = NO_MASK
        self._places[sequence] = sequence.mask_slot.place = place
        self.publish(sequence)

    def publish(self, sequence: DecodeSequence) -> None:
        """Write the mask, if known, then the position.

        Processors keep the order, so a step with the position finds the mask.
        """
        state, slot = sequence.grammar, sequence.mask_slot
        if state is not None and state.mask is not None and slot.place >= 0:
            self._masks[slot.place] = state.mask
            slot.position = len(sequence.token_ids)
            self._positions[slot.place] = slot.position


def _reads_masks(sequence: DecodeSequence) -> bool:
    """Tell whether a launched or coming step may read the masks of a sequence."""
    return sequence.num_in_flight > 0 or not (sequence.ended or sequence.is_paused)
