"""Roles of workers; apart from the messages, because worker and operator messages both use roles."""

from enum import IntEnum


class Role(IntEnum):
    PREFILL = 1
    DECODE = 2

    @property
    def other(self) -> "Role":
        """The opposite role."""
        return Role.DECODE if self is Role.PREFILL else Role.PREFILL

    @property
    def label(self) -> str:
        """Name of the role in worker names, metrics and pages."""
        return self.name.lower()
