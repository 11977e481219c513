"""A worker's ends of the processes that follow grammars, and the texts followed there."""

import contextlib
import os
import weakref
from collections import deque
from dataclasses import dataclass, field

from common.grammar.follower import Follower
from common.grammar.records import Job


@dataclass(slots=True, eq=False)
class Process:
    """A process that follows texts under a grammar; a later grammar may replace the first."""

    number: int
    pipe: int  # for messages; -1 once closed
    heard_s: float  # time of the last record, or of the first open job
    grammar: str = ""  # "" before the first grammar
    due: deque[tuple[int, int]] = field(default_factory=deque)  # (text, place) of open jobs, in order of answers
    unsent: bytearray = field(default_factory=bytearray)
    num_texts: int = 0
    is_forked: bool = False
    is_heavy: bool = False  # slow or large, so never gets a new grammar
    is_killed: bool = False  # to be killed, because of silence

    @property
    def is_open(self) -> bool:
        return self.pipe >= 0

    @property
    def is_idle(self) -> bool:
        return self.is_open and not self.num_texts and not self.due

    def send(self, data: bytes) -> None:
        """Write; bytes without room in the pipe wait for `flush`."""
        self.unsent += data
        self.flush()

    def flush(self) -> None:
        if self.unsent and self.is_open:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):  # the server reports the end
                del self.unsent[: os.write(self.pipe, self.unsent)]

    def close(self) -> None:
        """Close the pipe; the process ends after reading the rest."""
        if self.is_open:
            os.close(self.pipe)
            self.pipe = -1


@dataclass(slots=True, eq=False)
class Text:
    """A text's process, and the outputs known there."""

    number: int
    process: Process | None = None
    num_sent: int = 0  # outputs

    def end(self) -> None:
        """Tell the process about the end of the text."""
        if self.process is not None and self.process.is_open:
            self.process.num_texts -= 1
            self.process.send(Job(self.number).pack())


class Texts:
    """Texts of followers; a text ends with its follower."""

    def __init__(self) -> None:
        self._texts: weakref.WeakKeyDictionary[Follower, Text] = weakref.WeakKeyDictionary()
        self._num_texts = 0
        self._ended: list[Text] = []  # their processes do not know yet

    def of(self, follower: Follower) -> Text:
        """Return the follower's text, made at the first call."""
        if (known := self._texts.get(follower)) is not None:
            return known
        self._num_texts += 1
        text = self._texts[follower] = Text(self._num_texts)
        weakref.finalize(follower, self._ended.append, text).atexit = False
        return text

    def report_ended(self) -> bool:
        """Tell processes about ended texts; return whether there were any."""
        has_ended = bool(self._ended)
        while self._ended:
            self._ended.pop().end()
        return has_ended
