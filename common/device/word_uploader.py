"""Words that the host tells the device without waiting for the stream."""

from collections import deque

import numpy as np
import torch
from torch import Tensor

FIRST_WORDS = 1 << 16
"""Of a buffer: memory is seldom pinned while streams wait for it, as that takes milliseconds."""


class WordStage:
    """Memory of the host for int32 words that what is launched next reads.

    Two pinned buffers take turns, since the last launch may still wait for the step in flight. That
    step started after the launch before it, so a buffer is free again when its turn comes; its event
    makes sure.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._buffers = deque(
            (self._pinned(FIRST_WORDS), torch.cuda.Event() if self._is_cuda else None) for _ in range(2)
        )

    def room(self, num_words: int) -> Tensor:
        """At least so many words, to be filled."""
        buffer, event = self._buffers[0]
        if event is not None:
            event.synchronize()
        if buffer.numel() < num_words:
            buffer = self._pinned(2 * num_words)
            self._buffers[0] = buffer, event
        return buffer

    def launched(self) -> None:
        """What reads the words is launched."""
        _, event = self._buffers[0]
        if event is not None:
            event.record()
        self._buffers.rotate(-1)

    def _pinned(self, num_words: int) -> Tensor:
        return torch.empty(num_words, dtype=torch.int32, pin_memory=self._is_cuda)


class WordUploader:
    """Sends int32 arrays of any length, one before each step."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._stage = device, WordStage(device)

    def send(self, words: np.ndarray) -> Tensor:
        """The words on the device, in stream order."""
        if self.device.type == "cpu":
            return torch.from_numpy(words)
        buffer = self._stage.room(len(words))
        buffer.numpy()[: len(words)] = words
        sent = buffer[: len(words)].to(self.device, non_blocking=True)
        self._stage.launched()
        return sent
