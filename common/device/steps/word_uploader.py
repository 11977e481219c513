"""Words that the host tells the device without waiting for the stream."""

from collections import deque

import numpy as np
import torch
from torch import Tensor

FIRST_WORDS = 1 << 16
"""Of a buffer: memory is seldom pinned while streams wait for it, as that takes milliseconds."""


class WordBuffer:
    """Memory of the host for int32 words, as torch and as numpy have it, and when it was last read."""

    __slots__ = ("array", "event", "words")

    def __init__(self, num_words: int, event: "torch.cuda.Event | None") -> None:
        self.words = torch.empty(num_words, dtype=torch.int32, pin_memory=event is not None)
        self.array: np.ndarray = self.words.numpy()  # once: of a core that has not done it lately it takes 50 us
        self.event = event


class WordStage:
    """Words that what is launched next reads.

    Two pinned buffers take turns, since the last launch may still wait for the step in flight. That
    step started after the launch before it, so a buffer is free again when its turn comes; its event
    makes sure.
    """

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._buffers = deque(WordBuffer(FIRST_WORDS, torch.cuda.Event() if is_cuda else None) for _ in range(2))
        self._is_filled = False

    def room(self, num_words: int) -> WordBuffer:
        """For at least so many, to be filled; what was filled before has been launched."""
        self.launched()
        buffer = self._buffers[0]
        if buffer.event is not None:
            buffer.event.synchronize()
        if len(buffer.array) < num_words:
            buffer = self._buffers[0] = WordBuffer(2 * num_words, buffer.event)
        self._is_filled = True
        return buffer

    def launched(self) -> None:
        """What reads the words, if there are some, is launched; sooner or later, as it suits."""
        if self._is_filled:
            if (event := self._buffers[0].event) is not None:
                event.record()
            self._buffers.rotate(-1)
            self._is_filled = False


class WordUploader:
    """Sends int32 arrays of any length, one before each step."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._stage = device, WordStage(device)

    def send(self, words: np.ndarray) -> Tensor:
        """The words on the device, in stream order."""
        if self.device.type == "cpu":
            return torch.from_numpy(words)
        buffer = self._stage.room(len(words))
        buffer.array[: len(words)] = words
        sent = buffer.words[: len(words)].to(self.device, non_blocking=True)
        self._stage.launched()
        return sent
