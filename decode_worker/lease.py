"""How long a prefill worker keeps the blocks of a handoff for us, as far as we can know.

It keeps them from when our last request arrived; we know when we sent it. Half of that time we count on,
so nothing depends on how long a message takes, and after the whole of it the blocks must be taken for lost.
"""

from dataclasses import dataclass

RENEWALS = 6
"""Requests in the time of a lease, of which one has to arrive and be confirmed."""


@dataclass(slots=True)
class Lease:
    """Of one handoff; times are seconds of the caller's clock."""

    length_s: float
    asked_s: float  # when we last asked to keep them, or heard of them
    sure_until_s: float

    @staticmethod
    def begun(length_s: float, now_s: float) -> "Lease":
        """Of a handoff that has just arrived; it may have waited in a socket."""
        return Lease(length_s, now_s, now_s + length_s / 2)

    def is_due(self, now_s: float) -> bool:
        """Whether to ask again."""
        return now_s - self.asked_s > self.length_s / RENEWALS

    def confirm(self) -> None:
        """The prefill worker says that it keeps them: from when we asked."""
        self.sure_until_s = self.asked_s + self.length_s / 2

    def is_sure(self, now_s: float) -> bool:
        """Whether a pull may begin."""
        return now_s <= self.sure_until_s

    def is_over(self, now_s: float) -> bool:
        """Whether the blocks must be taken for lost."""
        return now_s > self.sure_until_s + self.length_s / 2
