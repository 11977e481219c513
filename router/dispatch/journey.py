"""Where a completion was and when, told as it happens to those who watch; without any there is no journey."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from common.base.json_file import Json
from router.dispatch.phases import Phase
from router.placement.route import Route


class Arrival(NamedTuple):
    """How an HTTP request came in; seconds of the dispatcher's clock, 0 for what was not noted."""

    received_s: float = 0.0  # it began to
    body_s: float = 0.0  # its body was here
    read_s: float = 0.0  # its prompts were tokens


UNNOTED = Arrival()


class Leg(NamedTuple):
    """The stay in one phase of an attempt."""

    phase: Phase
    begin_s: float
    attempt: int
    route: Route | None  # none in the queue


class End(NamedTuple):
    """How it ended. `facts` are those of the log: sizes, times and names, never text."""

    now_s: float
    last_token_s: float  # 0 if there was none
    facts: Mapping[str, Json]


class Watcher(Protocol):
    """Who is told of one completion."""

    def left(self, leg: Leg, end_s: float) -> None: ...

    def ended(self, end: End) -> None: ...


Watch = Callable[[int], Watcher | None]
"""Of a choice of an HTTP request, by its index."""


def no_watch(index: int) -> Watcher | None:
    """Nobody."""
    return None


class Journey:
    """Of one completion."""

    __slots__ = ("_leg", "_watchers")

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = watchers
        self._leg: Leg | None = None

    def enter(self, phase: Phase, now_s: float, attempt: int, route: Route | None) -> None:
        """It goes from one phase to the next."""
        self._leave(now_s)
        self._leg = Leg(phase, now_s, attempt, route)

    def end(self, end: End) -> None:
        self._leave(end.now_s)
        for watcher in self._watchers:
            watcher.ended(end)

    def _leave(self, now_s: float) -> None:
        leg, self._leg = self._leg, None
        if leg is not None:
            for watcher in self._watchers:
                watcher.left(leg, now_s)
