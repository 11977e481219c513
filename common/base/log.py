"""One log line format for every process: time, level, process, request, text; or the same as JSON, for programs.

Whoever logs never waits: a thread writes the lines. When nobody reads them, or the disk is full, lines are dropped and
counted, and serving goes on.
"""

import json
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime

from common.base.background_writer import BackgroundWriter

FORMS = ("text", "json")


class LineWriter(logging.Handler):
    """Writes lines to a file descriptor, from a thread of its own."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._writer = BackgroundWriter(descriptor, lambda num_lost: f"{loss_line(self.format, num_lost)}\n")

    def emit(self, record: logging.LogRecord) -> None:
        self._writer.write(f"{self.format(record)}\n")

    def flush(self) -> None:
        """Wait until all is written, but not for long."""
        self._writer.flush()


def loss_line(format_record: Callable[[logging.LogRecord], str], num_lost: int) -> str:
    """A warning that so many lines are missing where it stands."""
    text = f"{num_lost} lines were dropped here, because nobody read them or they could not be written"
    return format_record(logging.makeLogRecord({"msg": text, "levelname": "WARNING"}))


class JsonFormatter(logging.Formatter):
    """A line is a JSON object, in ASCII: time (UTC), level, process, message, then what the record has as `fields`."""

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
    """Of the lines of a process, for example `prefill-0`; `form` is one of FORMS."""
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
