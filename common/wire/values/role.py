"""What a worker does; apart from the messages, as those of operators speak of it, too."""

from enum import IntEnum


class Role(IntEnum):
    PREFILL = 1
    DECODE = 2

    @property
    def other(self) -> "Role":
        """Of the two."""
        return Role.DECODE if self is Role.PREFILL else Role.PREFILL

    @property
    def label(self) -> str:
        """As names, metrics and pages have it."""
        return self.name.lower()
