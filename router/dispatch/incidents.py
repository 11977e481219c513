"""Recent failures and changes for operators: bounded, and without a word of any prompt.

An event at hundreds of completions is a single entry with a count.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

NUM_KEPT = 60
NUM_ALIKE = 8
"""Latest entries searched for an equal text."""
MAX_CHARS = 300


class Kind(Enum):
    REPLAY = "replay"  # a completion is started again
    FAILED = "failed"  # a completion's client got an error
    LOST = "lost"  # a worker, a memory server, or the KV path between two
    LEFT = "left"  # a worker or memory server, in order
    JOINED = "joined"
    CHANGED = "changed"  # a worker gives way to a worker of the other role


@dataclass(slots=True)
class Incident:
    """Incidents with equal kind and text."""

    kind: Kind
    text: str
    at_s: float  # wall clock of the latest
    num: int = 1


class Incidents:
    """The latest incidents, oldest first."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._kept: deque[Incident] = deque(maxlen=NUM_KEPT)

    def __iter__(self) -> Iterator[Incident]:
        return iter(self._kept)

    def add(self, kind: Kind, text: str) -> None:
        """Record an incident; `text` comes from the router or a worker, never from a client."""
        text, now_s = text[:MAX_CHARS], self._clock()
        for incident in list(self._kept)[-NUM_ALIKE:]:
            if (incident.kind, incident.text) == (kind, text):
                self._kept.remove(incident)
                self._kept.append(Incident(kind, text, now_s, incident.num + 1))
                return
        self._kept.append(Incident(kind, text, now_s))
