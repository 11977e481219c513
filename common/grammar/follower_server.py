"""`python -m common.grammar.follower_server`: loads a model's tokens, and forks processes that follow grammars.

    follower_server PATH VOCAB MASKS RECORDS

MASKS and RECORDS are descriptors: memory for masks, and a pipe for records. Stdin is a socket (SOCK_SEQPACKET) of the
worker. Each packet asks for a new process, with the read end of a pipe for messages, or for the end of a process. The
server and all processes end with the socket.
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
from contextlib import suppress
from pathlib import Path

from common.base.process import memory_in_use, trim_memory
from common.checkpoint.files import open_model
from common.grammar.end_tokens import end_token_ids
from common.grammar.follower_process import FollowerProcess, live
from common.grammar.grammars import Grammars
from common.grammar.records import MAX_PLACES, ORDER, Kind, Masks, Record, mask_bytes_of
from common.grammar.text_matcher import TextMatcher

INPUT = 0
NICENESS = 5
"""Below the worker's own priority, because other requests wait for the worker."""
WARM_UP = json.dumps({"grammars": [{"json_schema": {"type": "object", "properties": {"a": {"type": "string"}}}}]})


class Server:
    """The server, which forks processes and reports their ends."""

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
        """Wait for orders and ends of processes; return false after the worker's end."""
        is_there = True
        for key, _ in self._selector.select():
            if key.fileobj is self._control:
                is_there = self._handle_order()
            else:
                self._reap(key.data)
        return is_there

    def _handle_order(self) -> bool:
        """Carry out an order of the worker; return false after the worker's end."""
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
            self._send(Record(Kind.ENDED, number, text=f"no process for it: {error.strerror}"))
            return
        if pid == 0:
            live(process, jobs, parent, self._in_use)
        pidfd = os.pidfd_open(pid)
        self._pids[number] = pid, pidfd
        self._selector.register(pidfd, selectors.EVENT_READ, number)
        self._send(Record(Kind.FORKED, number))

    def _reap(self, number: int) -> None:
        pid, pidfd = self._pids.pop(number)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._send(Record(Kind.ENDED, number, status))

    def _send(self, record: Record) -> None:
        os.write(self._records, record.pack())


class Warnings(logging.Handler):
    """A handler that keeps log lines, because a forking process must have no writer thread."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    """Serve the worker at the other end of stdin."""
    path, vocab, masks, records = Path(sys.argv[1]), *map(int, sys.argv[2:])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a draining worker still needs the server
    os.nice(NICENESS)
    # Python would warn of the library's threads for batches; forked processes need no such threads.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    logging.getLogger().addHandler(warned := Warnings())
    begin_s, mask_bytes = time.monotonic(), mask_bytes_of(vocab)
    shared = Masks(mmap.mmap(masks, MAX_PLACES * mask_bytes), mask_bytes)
    try:
        grammars = Grammars.of_model(path, vocab, end_token_ids(open_model(path)))
        _warm_up(grammars, shared)
    except Exception as error:  # noqa: BLE001 - whatever a library says of a tokenizer that it cannot read
        os.write(records, Record(Kind.FAILED, text=f"{error!s:.300}").pack())
        return
    trim_memory()  # frees a quarter of the memory for loading
    gc.collect()
    gc.freeze()  # so collections in processes do not write to shared pages
    took_ms = int((time.monotonic() - begin_s) * 1e3)
    os.write(records, Record(Kind.READY, number=took_ms, text="; ".join(warned.lines)).pack())
    Server(grammars, shared, socket.socket(fileno=INPUT), records).run()


def _warm_up(grammars: Grammars, masks: Masks) -> None:
    """Do the library's one-time work here, because each forked process would repeat the work."""
    TextMatcher(grammars, grammars.compile(WARM_UP)).follow((), masks, 0)


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the worker is gone
        main()
