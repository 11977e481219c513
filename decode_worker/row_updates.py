"""The rows' changes as the words that the device is sent, and the way there."""

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from common.device.sampling_tensors import sampling_words
from common.device.word_uploader import WordUploader
from common.kernels.operands import RowUpdates
from common.wire.sampling_params import PADDING
from decode_worker.rows import NO_SLOT, Change, Clear, Fill, Grow


class RowUploader:
    """Packs changes and sends them. Whatever the host counts, nothing is written beyond a row's own block table.

    Args:
        max_blocks: entries of a block table.
        max_len: tokens of a row.
    """

    def __init__(self, max_blocks: int, max_len: int, device: torch.device) -> None:
        self.max_blocks = max_blocks
        self.max_len = max_len
        self._uploader = WordUploader(device)

    def upload(self, changes: SequenceOf[Change]) -> RowUpdates:
        """The changes on the device."""
        rows = [change for change in changes if not isinstance(change, Grow)]
        places, blocks = self._entries(changes)
        words = np.concatenate((*_columns(rows, self.max_len), *places, *blocks))
        return RowUpdates(self._uploader.send(words), len(rows), sum(map(len, places)))

    def _entries(self, changes: SequenceOf[Change]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Block table entries to be written, and the blocks, both in pieces: int32."""
        fills = [change for change in changes if isinstance(change, Fill)]
        grown = [change for change in changes if isinstance(change, Grow) and change.index < self.max_blocks]
        blocks = [np.array(fill.sequence.block_ids[: self.max_blocks], np.int32) for fill in fills]
        places = [
            np.arange(len(ids), dtype=np.int32) + fill.row * self.max_blocks
            for fill, ids in zip(fills, blocks, strict=True)
        ]
        places.append(np.array([grow.row * self.max_blocks + grow.index for grow in grown], np.int32))
        blocks.append(np.array([grow.block_id for grow in grown], np.int32))
        return places, blocks


def _columns(changes: SequenceOf[Fill | Clear], max_len: int) -> list[np.ndarray]:
    """What the rows are told, as `RowUpdates` has it: int32."""
    heads, sampling = [], []
    for change in changes:
        params, source, token, seq_len, slot = PADDING, -1, 0, 0, NO_SLOT
        if isinstance(change, Fill):
            sequence = change.sequence
            params, source, slot = sequence.sampling, change.source, change.state_slot
            token, seq_len = sequence.token_ids[-1], min(max_len, sequence.num_scheduled)
        heads.append((change.row, source, token, seq_len, slot))
        sampling.append(params)
    return [np.array(heads, np.int32).T.ravel(), *sampling_words(sampling)]
