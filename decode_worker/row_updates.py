"""The rows' changes as the words that the device is sent, and the way there."""

from collections import deque
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from common.device.sampling_tensors import sampling_words
from common.kernels.operands import RowUpdates
from common.wire.sampling_params import PADDING
from decode_worker.rows import Change, Clear, Fill, Grow


class RowUploader:
    """Packs changes and sends them to the device without waiting for the stream.

    Two pinned buffers take turns, since the last upload may still wait for the step in flight. That
    step started after the upload before it, so a buffer is free again when its turn comes; its event
    makes sure. Whatever the host counts, nothing is written beyond a row's own block table.

    Args:
        max_blocks: entries of a block table.
        max_len: tokens of a row.
    """

    def __init__(self, max_blocks: int, max_len: int, device: torch.device) -> None:
        self.max_blocks = max_blocks
        self.max_len = max_len
        self.device = device
        if device.type == "cuda":
            self._buffers = deque((torch.empty(0, dtype=torch.int32), torch.cuda.Event()) for _ in range(2))

    def upload(self, changes: SequenceOf[Change]) -> RowUpdates:
        """The changes on the device."""
        rows = [change for change in changes if not isinstance(change, Grow)]
        places, blocks = self._entries(changes)
        words = np.concatenate((*_columns(rows, self.max_len), *places, *blocks))
        return RowUpdates(self._send(words), len(rows), sum(map(len, places)))

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

    def _send(self, words: np.ndarray) -> Tensor:
        if self.device.type == "cpu":
            return torch.from_numpy(words)
        buffer, event = self._buffers.popleft()
        event.synchronize()
        if buffer.numel() < len(words):
            buffer = torch.empty(2 * len(words), dtype=torch.int32, pin_memory=True)
        self._buffers.append((buffer, event))
        buffer.numpy()[: len(words)] = words
        sent = buffer[: len(words)].to(self.device, non_blocking=True)
        event.record()
        return sent


def _columns(changes: SequenceOf[Fill | Clear], max_len: int) -> list[np.ndarray]:
    """What the rows are told, as `RowUpdates` has it: int32."""
    heads, sampling = [], []
    for change in changes:
        params, source, token, seq_len = PADDING, -1, 0, 0
        if isinstance(change, Fill):
            sequence = change.sequence
            params, source = sequence.sampling, change.source
            token, seq_len = sequence.token_ids[-1], min(max_len, sequence.num_scheduled)
        heads.append((change.row, source, token, seq_len))
        sampling.append(params)
    return [np.array(heads, np.int32).T.ravel(), *sampling_words(sampling)]
