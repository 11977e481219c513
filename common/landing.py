"""Sampled tokens on their way to the host, so that a step can be launched without waiting for the one before it.

Tokens come back through pinned memory by a copy in stream order: what a step sampled is on its way
before the next step, or the next replay of the same graph, may overwrite it.
"""

from collections import deque

import torch
from torch import Tensor

NUM_SLOTS = 3
"""One step runs, one is queued, one is being read."""
LOOK_INTERVAL_S = 50e-6
"""A loop's sleep between two looks at whether a step is over: short beside a step, long beside a look."""


class PendingTokens:
    """The tokens of one launched step."""

    def __init__(self, tokens_cpu: Tensor, event: "torch.cuda.Event | None") -> None:
        self.tokens_cpu = tokens_cpu  # [num_rows] int32
        self.event = event

    def ready(self) -> bool:
        """Whether the step is over: its tokens are here and all it wrote is written."""
        return self.event is None or bool(self.event.query())

    def tokens(self) -> list[int]:
        """The sampled token of each row; waits for the step."""
        if self.event is not None:
            self.event.synchronize()
        tokens: list[int] = self.tokens_cpu.tolist()
        return tokens


class Landing:
    """Pinned memory for the tokens of `NUM_SLOTS` steps of up to `max_rows` rows, used in turn."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        num_slots = NUM_SLOTS if self.is_cuda else 0
        self.slots = deque(torch.zeros(max_rows, dtype=torch.int32).pin_memory() for _ in range(num_slots))

    def fetch(self, sampled: Tensor) -> PendingTokens:
        """Start copying `sampled [num_rows]` int32; at most `NUM_SLOTS` may be unread at once."""
        if not self.is_cuda:
            return PendingTokens(sampled.clone(), None)
        slot = self.slots[0][: sampled.shape[0]]
        self.slots.rotate(-1)
        slot.copy_(sampled, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return PendingTokens(slot, event)
