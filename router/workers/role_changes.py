"""Workers replaced by a worker of the other role, as reported by the operator: for metrics and health.

Nothing is decided here. A worker that comes or goes is handled like any other.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from common.base.json_file import JsonObject
from common.wire.messages.operator import RoleChange, Stage
from common.wire.messages.worker import Role
from router.dispatch.incidents import Incidents, Kind

NUM_KEPT = 5
STAGES = {Stage.BEGUN: "under way", Stage.DONE: "done", Stage.GIVEN_UP: "given up"}


@dataclass(frozen=True, slots=True)
class Entry:
    """A role change at the last report, with the reason given at the beginning."""

    change: RoleChange
    at_s: float
    reason: str

    @property
    def names(self) -> tuple[str, str]:
        return self.change.name, self.change.successor


class RoleChanges:
    """The latest role changes, oldest first, and totals since the router's start."""

    def __init__(self, incidents: Incidents, clock: Callable[[], float] = time.monotonic) -> None:
        self._incidents, self._clock = incidents, clock
        self._kept: deque[Entry] = deque(maxlen=NUM_KEPT)
        self.num = Counter[tuple[Role, Stage]]()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._kept)

    def on_change(self, _: bytes, change: RoleChange) -> None:
        """Record a change that has begun or ended."""
        self._incidents.add(Kind.CHANGED, change.reason)
        self.num[change.role, change.stage] += 1
        entry = Entry(change, self._clock(), change.reason)
        if self._kept and self._kept[-1].names == entry.names and self._kept[-1].change.stage is Stage.BEGUN:
            entry = replace(entry, reason=self._kept.pop().reason)
        self._kept.append(entry)

    def report(self, now_s: float) -> list[JsonObject]:
        """Return the changes for GET /health, latest first."""
        return [
            {
                "from": each.change.name,
                "to": each.change.successor,
                "state": STAGES[each.change.stage],
                "ago_s": round(now_s - each.at_s, 1),
                "reason": each.reason,
            }
            for each in reversed(self._kept)
        ]
