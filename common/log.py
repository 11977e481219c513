"""One log line format for every process: time, level, process, request, text; or the same as JSON, for programs.

Whoever logs never waits: lines are queued, and a thread writes them. When nobody reads what is written, lines are
dropped and counted, and serving goes on.
"""

import contextlib
import json
import logging
import os
import queue
import sys
import threading
from datetime import UTC, datetime

FORMS = ("text", "json")
MAX_QUEUED_LINES = 10_000
FLUSH_S = 1.0
"""How long the end of the process may wait for its last lines to be read."""


class LineWriter(logging.Handler):
    """Writes lines to a file descriptor, from a thread of its own."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: queue.Queue[str] = queue.Queue(MAX_QUEUED_LINES)
        self._num_dropped = self._num_reported = 0
        threading.Thread(target=self._write_forever, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._num_dropped += 1

    def flush(self) -> None:
        """Wait until all is written, but not for long; and say what was dropped last, as no line comes after it."""
        with self._lines.all_tasks_done:
            is_written = self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, FLUSH_S)
        if is_written:
            self._write(self._report().encode())

    def _write_forever(self) -> None:
        while True:
            line = self._lines.get()
            self._write(f"{line}\n{self._report()}".encode(errors="backslashreplace"))
            self._lines.task_done()

    def _report(self) -> str:
        """A line about the lines that were dropped since the last one, if any were."""
        num_new = self._num_dropped - self._num_reported
        self._num_reported += num_new
        if not num_new:
            return ""
        text = f"{num_new} lines were dropped here, as nobody read them"
        return f"{self.format(logging.makeLogRecord({'msg': text, 'levelname': 'WARNING'}))}\n"

    def _write(self, data: bytes) -> None:
        """Not through `sys.stderr`: a process cannot end in order while a thread waits in there for a reader."""
        with contextlib.suppress(OSError):  # the other end is closed, or does not block and is full
            while data:
                data = data[os.write(self._descriptor, data) :]


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
    return logging.Formatter(f"%(asctime)s.%(msecs)03d %(levelname).1s [{process}] %(message)s", "%H:%M:%S")


def setup_logging(process: str, level: str = "INFO", form: str = "text") -> None:
    """Send the root logger to stderr, each line tagged with `process`."""
    writer = LineWriter(sys.stderr.fileno())
    writer.setFormatter(formatter(process, form))
    root = logging.getLogger()
    root.handlers[:] = [writer]
    root.setLevel(level)
