"""A process's part of a trace: a file with a slice on each line, written without blocking the caller.

A thread writes the queued lines several times a second, whole lines at a time. A killed process loses its last fraction
of a second, and at most its last line is cut. A long trace keeps its last part.
"""

import errno
import json
import logging
import os
import re
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from common.base.errors import ConfigError
from common.base.json_file import JsonObject

logger = logging.getLogger(__name__)

SUFFIX, OLDER = ".jsonl", ".older.jsonl"
FLUSH_S = 0.2
MAX_QUEUED_LINES = 200_000
"""Lines beyond the limit are dropped and counted."""
LINES_AT_ONCE = 2_000
"""Lines joined and written in a go; other threads wait for a fraction of a millisecond."""
CLOSE_S = 2.0
MAX_STARTS = 4
"""Starts of a process whose files are kept."""
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors of a full or failing disk; a process starts and serves without a trace."""


class Process(NamedTuple):
    """Owner of a trace file."""

    role: str
    id: str
    epoch: int


class TraceFile:
    """Queue of lines for a file; call `write` from a single thread.

    Args:
        directory: created if missing, for the current user alone.
        max_bytes: limit for the file and its older part together; the older half is dropped first.

    Raises ConfigError if the directory cannot be written. On a full disk, logs an error and writes no trace.
    """

    def __init__(self, directory: Path, process: Process, max_bytes: int) -> None:
        self.path = directory / f"{_file_name(process)}{SUFFIX}"
        self._older = directory / f"{_file_name(process)}{OLDER}"
        self._process, self._part_bytes = process, max_bytes // 2
        self._lines: deque[str] = deque()
        self._num_dropped = 0
        self._descriptor: int | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._write_forever, name="trace", daemon=True)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _drop_old(directory, process)
            self._begin_part()
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                reason = error.strerror or error
                raise ConfigError(f"trace.dir = {str(directory)!r}: {reason}; name a directory to write to") from None
            self._give_up(error)
            return
        self._thread.start()
        logger.info("tracing to %s", self.path)

    def write(self, line: str) -> None:
        """Queue a line, which ends with a line break."""
        if len(self._lines) < MAX_QUEUED_LINES:
            self._lines.append(line)
        else:
            self._num_dropped += 1

    def close(self) -> None:
        """Write the queued lines, unless the disk takes too long."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _write_forever(self) -> None:
        try:
            while not self._ends.wait(FLUSH_S):
                self._flush()
            self._flush()
            self._end_file()
        except OSError as error:
            self._give_up(error)
        if self._num_dropped:
            logger.warning("%s lacks %d lines, for which the disk was too slow", self.path, self._num_dropped)

    def _give_up(self, error: OSError) -> None:
        logger.error("the trace ends here, nothing else does: %s: %s", self.path, error)
        self._num_dropped, self._lines = 0, deque(maxlen=0)
        with suppress(OSError):
            self._end_file()

    def _flush(self) -> None:
        while self._lines:
            lines = [self._lines.popleft() for _ in range(min(LINES_AT_ONCE, len(self._lines)))]
            data = "".join(lines).encode()
            if self._num_bytes + len(data) > self._part_bytes and self._num_bytes:
                self._end_part()
            self._put(data)
            time.sleep(0)

    def _end_part(self) -> None:
        """Rename the file to the older part, replacing the previous older part, and begin a new file."""
        if not self._older.exists():
            logger.warning("%s is long: its older parts are dropped from now on (trace.max_bytes)", self.path)
        self._end_file()
        self.path.replace(self._older)
        self._begin_part()

    def _begin_part(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor, self._num_bytes = os.open(self.path, flags, 0o600), 0
        self._put(f"{json.dumps(_header(self._process))}\n".encode())

    def _end_file(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _put(self, data: bytes) -> None:
        assert self._descriptor is not None, "a part has begun"
        self._num_bytes += len(data)
        while data:
            data = data[os.write(self._descriptor, data) :]


def _drop_old(directory: Path, process: Process) -> None:
    """Remove the files of all but the last starts of the process."""
    starts: dict[str, list[Path]] = {}  # the latest first
    for path in sorted(directory.glob(f"{_owner(process)}.*{SUFFIX}"), key=_age_s):
        starts.setdefault(path.name.split(".")[2], []).append(path)
    for paths in list(starts.values())[MAX_STARTS - 1 :]:
        for path in paths:
            logger.info("%s is of an old start, and removed", path)
            path.unlink(missing_ok=True)


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:  # just renamed to the older part, or removed by another start
        return 0.0


def _file_name(process: Process) -> str:
    return f"{_owner(process)}.{process.epoch:x}"


def _owner(process: Process) -> str:
    """Build the file name's prefix; differs from the process id, which may hold any character."""
    return f"{process.role}.{re.sub(r'[^A-Za-z0-9_-]', '_', process.id)}"


def _header(process: Process) -> JsonObject:
    """Return a file's first line: the process, and the monotonic and wall clocks at the same moment."""
    moment = {"monotonic_ns": time.monotonic_ns(), "unix_ns": time.time_ns()}
    return {**process._asdict(), "pid": os.getpid(), "host": socket.gethostname(), "boot": _boot(), **moment}


def _boot() -> str:
    """Return the boot id; processes of the same boot share a monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
