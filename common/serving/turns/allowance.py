"""Time for which streams wait for prompts of other clients: enough for a burst, earned while nobody is late."""

BURST_MS = 1000.0
"""Most that is saved up: enough for 80 prompts of 1,024 tokens to a 4B model on a large GPU."""
EARNED = 0.25
"""Part of the time without late prompts that is earned, so streams wait for others at most a fifth of the time."""


class Allowance:
    """The time left, in milliseconds."""

    def __init__(self) -> None:
        self.left_ms = BURST_MS

    def earn(self, calm_ms: float) -> None:
        """Add for time in which no prompt was late."""
        self.left_ms = min(BURST_MS, self.left_ms + EARNED * calm_ms)

    def spend(self, pause_ms: float) -> None:
        """Take off a pause; the last may take more than is left."""
        self.left_ms -= pause_ms
