"""Stop strings (field `stop`), and the search for the first in a stream of text."""

from collections.abc import Sequence

MAX_STOPS = 64
MAX_STOP_CHARS = 1024
"""Characters of all stop strings of a request together."""
NUM_CHARS = 0x110000  # of Unicode


class StopAutomaton:
    """Automaton over characters; a state is the longest suffix of the text that begins a stop string.

    A character costs the same for any number of stop strings (Aho and Corasick, "Efficient String Matching",
    Communications of the ACM, 1975). State 0 is the empty string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.depth = [0]  # characters of each state
        self.complete = [""]  # longest stop string at the end of each state
        self._next: dict[int, int] = {}
        self._shorter = [0]  # longest proper suffix of each state, as a state
        for stop in stops:
            self._add(stop)
        self._link()

    def step(self, state: int, char: str) -> int:
        """Return the state after another character."""
        while (following := self._next.get(state * NUM_CHARS + ord(char))) is None and state:
            state = self._shorter[state]
        return following or 0

    def _add(self, stop: str) -> None:
        state = 0
        for depth, char in enumerate(stop, 1):
            key = state * NUM_CHARS + ord(char)
            if key not in self._next:
                self._next[key] = len(self.depth)
                self.depth.append(depth)
                self.complete.append("")
                self._shorter.append(0)
            state = self._next[key]
        self.complete[state] = stop

    def _link(self) -> None:
        """Link states from the shortest to the longest, because fallbacks must be linked first."""
        for key, child in sorted(self._next.items(), key=lambda edge: self.depth[edge[1]]):
            state, char = divmod(key, NUM_CHARS)
            if state:
                self._shorter[child] = self.step(self._shorter[state], chr(char))
            self.complete[child] = self.complete[child] or self.complete[self._shorter[child]]


class StopMatcher:
    """Cuts a text before or after the first stop string, and withholds a possible beginning of a stop string."""

    def __init__(self, automaton: StopAutomaton, *, include: bool = False) -> None:
        self.found = ""  # the complete stop string; feed nothing afterwards
        self._automaton = automaton
        self._include = include
        self._state = 0
        self._withheld = ""

    def feed(self, chunk: str) -> str:
        """Return text to show now. The first complete stop string ends the text; of two at once, the longer."""
        automaton, state = self._automaton, self._state
        text = self._withheld + chunk
        for end, char in enumerate(chunk, len(self._withheld) + 1):
            state = automaton.step(state, char)
            if stop := automaton.complete[state]:
                self.found = stop
                self._withheld = ""
                return text[: end if self._include else end - len(stop)]
        self._state = state
        num_shown = len(text) - automaton.depth[state]
        self._withheld = text[num_shown:]
        return text[:num_shown]

    def flush(self) -> str:
        """Return the withheld text, which became no stop string."""
        withheld, self._withheld = self._withheld, ""
        return withheld
