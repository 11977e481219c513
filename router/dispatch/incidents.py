"""What went wrong lately, for whoever looks: bounded, and without a word of any prompt.

What happens to hundreds at once is one entry with a number.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

NUM_KEPT = 60
NUM_ALIKE = 8
"""Of the latest, among which one that says the same is looked for."""
MAX_CHARS = 300


class Kind(Enum):
    REPLAY = "replay"  # a completion is started again
    FAILED = "failed"  # a completion's client got an error
    LOST = "lost"  # a worker or memory server, or the way between two
    LEFT = "left"  # a worker or memory server, in order
    JOINED = "joined"
    CHANGED = "changed"  # a worker gives way to one of the other role


@dataclass(slots=True)
class Incident:
    """So many of a kind that say the same."""

    kind: Kind
    text: str
    at_s: float  # wall clock, of the last one
    num: int = 1


class Incidents:
    """The latest, oldest first."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._kept: deque[Incident] = deque(maxlen=NUM_KEPT)

    def __iter__(self) -> Iterator[Incident]:
        return iter(self._kept)

    def note(self, kind: Kind, text: str) -> None:
        """Something happened; `text` is ours or a worker's, never a client's."""
        text, now_s = text[:MAX_CHARS], self._clock()
        for incident in list(self._kept)[-NUM_ALIKE:]:
            if (incident.kind, incident.text) == (kind, text):
                self._kept.remove(incident)
                self._kept.append(Incident(kind, text, now_s, incident.num + 1))
                return
        self._kept.append(Incident(kind, text, now_s))
