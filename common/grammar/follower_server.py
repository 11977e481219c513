"""`python -m common.grammar.follower_server`: has a model's tokens, and forks processes that follow grammars.

    follower_server PATH VOCAB MASKS RECORDS

MASKS and RECORDS are descriptors: memory of masks, and a pipe for records. Its stdin is a socket (SOCK_SEQPACKET) of
the worker: each packet there asks for a process, with the read end of a pipe for its messages, or for the end of one.
The server ends with that socket, and all its processes with it.
"""

import contextlib
import gc
import json
import logging
import mmap
import os
import selectors
import signal
import socket
import sys
import time
import warnings
from pathlib import Path

from common.base.malloc import trim_memory
from common.base.memory_limit import memory_in_use
from common.grammar.end_tokens import end_token_ids
from common.grammar.follower_process import FollowerProcess, live
from common.grammar.grammars import Grammars
from common.grammar.records import MAX_PLACES, ORDER, Kind, Masks, Record, mask_bytes_of
from common.grammar.text_matcher import TextMatcher

INPUT = 0
NICENESS = 5
"""What a worker does itself comes first: others wait for it, too."""
WARM_UP = json.dumps({"grammars": [{"json_schema": {"type": "object", "properties": {"a": {"type": "string"}}}}]})


class Server:
    """Forks processes, and tells of their end."""

    def __init__(self, grammars: Grammars, masks: Masks, control: socket.socket, records: int) -> None:
        self._grammars, self._masks, self._control, self._records = grammars, masks, control, records
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._pids: dict[int, tuple[int, int]] = {}  # pid and pidfd, by number
        self._in_use = memory_in_use()

    def run(self) -> None:
        """Work until the worker is gone, then end all processes."""
        with contextlib.suppress(BrokenPipeError):
            while self._turn():
                pass
        for pid, _ in self._pids.values():
            os.kill(pid, signal.SIGKILL)
        for pid, _ in self._pids.values():
            os.waitpid(pid, 0)

    def _turn(self) -> bool:
        """Wait for what happens next; returns whether the worker is there."""
        is_there = True
        for key, _ in self._selector.select():
            if key.fileobj is self._control:
                is_there = self._obey()
            else:
                self._bury(key.data)
        return is_there

    def _obey(self) -> bool:
        """Do what the worker says; returns whether it is there."""
        order, pipes, _, _ = socket.recv_fds(self._control, ORDER.size, 1)
        if not order:
            return False
        is_end, number = ORDER.unpack(order)
        if not is_end:
            self._fork(number, pipes[0])
            os.close(pipes[0])
        elif number in self._pids:
            os.kill(self._pids[number][0], signal.SIGKILL)
        return True

    def _fork(self, number: int, jobs: int) -> None:
        parent, process = os.getpid(), FollowerProcess(number, self._grammars, self._masks, self._records)
        try:
            pid = os.fork()
        except OSError as error:
            self._tell(Record(Kind.ENDED, number, told=f"no process for it: {error.strerror}"))
            return
        if pid == 0:
            live(process, jobs, parent, self._in_use)
        pidfd = os.pidfd_open(pid)
        self._pids[number] = pid, pidfd
        self._selector.register(pidfd, selectors.EVENT_READ, number)
        self._tell(Record(Kind.FORKED, number))

    def _bury(self, number: int) -> None:
        pid, pidfd = self._pids.pop(number)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._tell(Record(Kind.ENDED, number, status))

    def _tell(self, record: Record) -> None:
        os.write(self._records, record.pack())


class Warnings(logging.Handler):
    """Keeps what is logged, as a process that forks has no thread that writes it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    """Serve the worker at the other end of stdin."""
    path, vocab, masks, records = Path(sys.argv[1]), *map(int, sys.argv[2:])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the worker drains, and needs this process until then
    os.nice(NICENESS)
    # The library has threads, for batches, which no process has or needs: that is all that Python would warn of.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    logging.getLogger().addHandler(told := Warnings())
    begin_s, mask_bytes = time.monotonic(), mask_bytes_of(vocab)
    shared = Masks(mmap.mmap(masks, MAX_PLACES * mask_bytes), mask_bytes)
    try:
        grammars = Grammars.of_model(path, vocab, end_token_ids(path))
        _warm_up(grammars, shared)
    except Exception as error:  # noqa: BLE001 - whatever a library says of a tokenizer that it cannot read
        os.write(records, Record(Kind.FAILED, told=f"{error!s:.300}").pack())
        return
    trim_memory()  # a quarter of what loading them took
    gc.collect()
    gc.freeze()  # no collection of a process writes to what all share
    took_ms = int((time.monotonic() - begin_s) * 1e3)
    os.write(records, Record(Kind.READY, number=took_ms, told="; ".join(told.lines)).pack())
    Server(grammars, shared, socket.socket(fileno=INPUT), records).run()


def _warm_up(grammars: Grammars, masks: Masks) -> None:
    """Do once what the library does once, which each process would do again."""
    TextMatcher(grammars, grammars.compile(WARM_UP)).follow((), masks, 0)


if __name__ == "__main__":
    main()
