"""Log lines in the same format for every process: time, level, process, request, text; or as JSON, for programs.

A thread writes the lines, so logging never waits. Lines without a reader or without disk space are dropped and counted,
and serving goes on.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime

from common.base.background_writer import BackgroundWriter
from common.base.process import process_began_s

FORMS = ("text", "json")


class LineWriter(logging.Handler):
    """Log handler that writes lines to a file descriptor from its own thread."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._writer = BackgroundWriter(descriptor, lambda num_lost: f"{loss_line(self.format, num_lost)}\n")

    def emit(self, record: logging.LogRecord) -> None:
        self._writer.write(f"{self.format(record)}\n")

    def flush(self) -> None:
        """Wait until all lines are written, but not for long."""
        self._writer.flush()


def loss_line(format_record: Callable[[logging.LogRecord], str], num_lost: int) -> str:
    """Format a warning about `num_lost` missing lines, for the place of the loss."""
    text = f"{num_lost} lines were dropped here, because nobody read them or they could not be written"
    return format_record(logging.makeLogRecord({"msg": text, "levelname": "WARNING"}))


class JsonFormatter(logging.Formatter):
    """Format of a log line as an ASCII JSON object: time (UTC), level, process, message, and the record's `fields`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": moment.replace("+00:00", "Z"),
            "level": record.levelname,
            "process": self._process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line | getattr(record, "fields", {}))


def formatter(process: str, form: str) -> logging.Formatter:
    """Build the formatter for the lines of a process, for example `prefill-0`; `form` is in FORMS."""
    if form == "json":
        return JsonFormatter(process)
    return logging.Formatter(f"%(asctime)s.%(msecs)03d %(levelname).1s [{process}] %(message)s", "%Y-%m-%d %H:%M:%S")


def setup_logging(process: str, level: str = "INFO", form: str = "text") -> None:
    """Send the root logger to stderr, each line tagged with `process`."""
    writer = LineWriter(sys.stderr.fileno())
    writer.setFormatter(formatter(process, form))
    root = logging.getLogger()
    root.handlers[:] = [writer]
    root.setLevel(level)


class StartLog:
    """Seconds of a process's start by part; a part lasts from the end of the part before, the first from the fork."""

    def __init__(self) -> None:
        self.began_s = self._ended_s = process_began_s()
        self.parts: list[tuple[str, float]] = []
        self._cpu_s = 0.0

    def ended(self, part: str) -> None:
        """Record that a part is over."""
        now_s = time.monotonic()
        self.parts.append((part, now_s - self._ended_s))
        self._ended_s, self._cpu_s = now_s, time.process_time()

    @property
    def text(self) -> str:
        """All parts in a line: `ready to serve 1.20 s after the process began: imports 0.80, weights 0.40; CPU 2.10`.

        The last number is CPU seconds of all threads until the end of the last part.
        """
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in self.parts)
        told = f"{parts}; CPU {self._cpu_s:.2f}"
        return f"ready to serve {self._ended_s - self.began_s:.2f} s after the process began: {told}"

    @property
    def fields(self) -> dict[str, object]:
        """All parts for a line in JSON, in seconds.

        Beside them are the pid, the beginning on the host's monotonic clock, and CPU time.
        """
        parts = [[part, round(seconds, 4)] for part, seconds in self.parts]
        began_s, cpu_s = round(self.began_s, 4), round(self._cpu_s, 4)
        return {"start": {"pid": os.getpid(), "began_s": began_s, "parts": parts, "cpu_s": cpu_s}}

    def report(self, logger: logging.Logger) -> None:
        """Log the line of a process that is ready."""
        logger.info("%s", self.text, extra={"fields": self.fields})
