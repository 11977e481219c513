"""Uploads of int32 words to the device without waiting for the stream."""

from collections import deque

import numpy as np
import torch
from torch import Tensor

FIRST_WORDS = 1 << 16
"""Size of a buffer; large because pinning memory takes milliseconds while streams wait."""


class WordBuffer:
    """Host memory for int32 words, as torch and numpy arrays, with the event of its last use."""

    __slots__ = ("array", "event", "words")

    def __init__(self, num_words: int, event: "torch.cuda.Event | None") -> None:
        self.words = torch.empty(num_words, dtype=torch.int32, pin_memory=event is not None)
        self.array: np.ndarray = self.words.numpy()  # made once, because a cold core takes 50 us
        self.event = event


class WordStage:
    """Words read by the next launch.

    Two pinned buffers take turns, because the last launch may still wait for the step in flight. The step in flight
    started after the launch before, so a buffer is free at its next turn. The buffer's event makes sure.
    """

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._buffers = deque(WordBuffer(FIRST_WORDS, torch.cuda.Event() if is_cuda else None) for _ in range(2))
        self._is_filled = False

    def room(self, num_words: int) -> WordBuffer:
        """Return a buffer for at least `num_words`, to be filled; earlier words must have been launched."""
        self.launched()
        buffer = self._buffers[0]
        if buffer.event is not None:
            buffer.event.synchronize()
        if len(buffer.array) < num_words:
            buffer = self._buffers[0] = WordBuffer(2 * num_words, buffer.event)
        self._is_filled = True
        return buffer

    def launched(self) -> None:
        """Mark the filled words, if any, as read by a launch; may be called late."""
        if self._is_filled:
            if (event := self._buffers[0].event) is not None:
                event.record()
            self._buffers.rotate(-1)
            self._is_filled = False


class WordUploader:
    """Sender of int32 arrays of any length, a single array before each step."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._stage = device, WordStage(device)

    def send(self, words: np.ndarray) -> Tensor:
        """Return the words on the device, in stream order."""
        if self.device.type == "cpu":
            return torch.from_numpy(words)
        buffer = self._stage.room(len(words))
        buffer.array[: len(words)] = words
        sent = buffer.words[: len(words)].to(self.device, non_blocking=True)
        self._stage.launched()
        return sent
