"""Display of forwarded log lines, and of a live line for each process while loading.

On a terminal each process's last progress line is redrawn in place. Elsewhere every line is printed once, so that logs
in files and journals stay plain.
"""

import logging
import re
import shutil
from collections.abc import Mapping
from typing import Protocol

from common.base.background_writer import BackgroundWriter
from common.base.log import JsonFormatter, formatter, loss_line

LOG_LINE = re.compile(r"^\S+ \S+ (?P<level>[DIWEC]) \[[^\]]*\] (?P<text>.*)$")
LEVELS = {"I": "INFO", "W": "WARNING", "E": "ERROR"}
UP_AND_CLEAR = "\x1b[{}F\x1b[J"  # {} lines up, to the start of the line, then clear to the end


class Sink(Protocol):
    """Receiver of text; never blocks, because a supervisor's event loop writes there."""

    def write(self, text: str, /) -> object: ...


def background_writer(descriptor: int, form: str = "text") -> BackgroundWriter:
    """Return a writer of the supervisor's log; lost lines are counted in the log."""
    format_record = formatter("baton", form).format
    return BackgroundWriter(descriptor, lambda num_lost: f"{loss_line(format_record, num_lost)}\n")


class Console:
    """Writer to `log`, with live lines on `terminal`, if any.

    If both are a single stream, informative lines are shown live while loading and not printed. Warnings, errors and
    tracebacks are printed above.
    """

    def __init__(self, log: Sink, terminal: Sink | None, form: str = "text") -> None:
        self._log, self._formatter = log, formatter("baton", form)
        self._terminal = terminal
        self._loading = terminal is not None
        self._progress: dict[str, str] = {}
        self._num_drawn = 0

    def child_line(self, name: str, line: str) -> None:
        """Print or show a line written by process `name` to stderr or stdout."""
        line = line.rsplit("\r", 1)[-1]
        match = LOG_LINE.match(line)
        informative = match is not None and match["level"] in "DI"
        if self._loading and match is not None and informative:
            self._progress[name] = match["text"]
        if not (self._loading and informative and self._log is self._terminal):
            self._write(line)
        self._draw()

    def say(self, text: str, level: str = "I", fields: Mapping[str, object] | None = None) -> None:
        """Print a line of the supervisor, in the common log format; `level` by its first letter, `fields` for JSON."""
        record = {"msg": text, "levelname": LEVELS[level], "fields": fields or {}}
        self._write(self._formatter.format(logging.makeLogRecord(record)))
        self._draw()

    def show(self, text: str) -> None:
        """Print lines for people; a JSON log gets them as a single record."""
        if isinstance(self._formatter, JsonFormatter):
            self.say(text)
        else:
            self._write(text)

    def end_loading(self) -> None:
        """Remove the live lines; everything is printed from now on."""
        self._erase()
        self._loading = False

    def _write(self, line: str) -> None:
        if self._log is self._terminal:
            self._erase()
        self._log.write(f"{line}\n")

    def _erase(self) -> None:
        if self._terminal is not None and self._num_drawn:
            self._terminal.write(UP_AND_CLEAR.format(self._num_drawn))
        self._num_drawn = 0

    def _draw(self) -> None:
        if not self._loading or self._terminal is None:
            return
        self._erase()
        width = shutil.get_terminal_size().columns
        lines = [f"{name:<10} {text}"[: width - 1] for name, text in sorted(self._progress.items())]
        self._terminal.write("".join(line + "\n" for line in lines))
        self._num_drawn = len(lines)
