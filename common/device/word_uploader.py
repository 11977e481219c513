"""Words that the host sends to the device without waiting for the stream."""

from collections import deque

import numpy as np
import torch
from torch import Tensor


class WordUploader:
    """Sends int32 arrays of any length, one before each step.

    Two pinned buffers take turns, since the last upload may still wait for the step in flight. That
    step started after the upload before it, so a buffer is free again when its turn comes; its event
    makes sure.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            self._buffers = deque((torch.empty(0, dtype=torch.int32), torch.cuda.Event()) for _ in range(2))

    def send(self, words: np.ndarray) -> Tensor:
        """The words on the device, in stream order."""
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
