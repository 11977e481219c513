"""The worker's end of the server process for grammars."""

import mmap
import os
import socket
import subprocess
import sys
from pathlib import Path

from common.grammar.records import MAX_PLACES, ORDER, READ_BYTES, Masks, Record, mask_bytes_of, unpack

SOURCE_ROOT = Path(__file__).resolve().parents[2]
END_TIMEOUT_S = 1.0


class ServerProcess:
    """A process of `python -m common.grammar.follower_server`, from construction to `end`; only `end` waits.

    Args:
        path: directory of the model.
        vocab: number of the model's tokens.
        module: the module to run, replaceable for tests.
    """

    def __init__(self, path: Path, vocab: int, module: str = "common.grammar.follower_server") -> None:
        mask_bytes = mask_bytes_of(vocab)
        shared = os.memfd_create("grammar-masks")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._records, to_write = os.pipe()
        try:
            os.ftruncate(shared, MAX_PLACES * mask_bytes)  # pages are allocated on first write
            self.masks = Masks(mmap.mmap(shared, MAX_PLACES * mask_bytes), mask_bytes)
            arguments = [path.absolute(), vocab, shared, to_write]  # links of the Hub's cache name blobs
            command = [sys.executable, "-m", module, *map(str, arguments)]
            pass_fds = shared, to_write
            self._process = subprocess.Popen(command, cwd=SOURCE_ROOT, stdin=theirs.fileno(), pass_fds=pass_fds)
        finally:
            theirs.close()
            os.close(shared)
            os.close(to_write)
        self._control.setblocking(False)
        os.set_blocking(self._records, False)
        self._received = bytearray()

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self, number: int) -> int:
        """Ask for a process; return the pipe for its messages, owned by the caller. Raises OSError."""
        jobs, to_write = os.pipe()
        try:
            socket.send_fds(self._control, [ORDER.pack(False, number)], [jobs])
        except OSError:
            os.close(to_write)
            raise
        finally:
            os.close(jobs)
        os.set_blocking(to_write, False)
        return to_write

    def kill(self, number: int) -> None:
        """Ask for the end of a process; raises OSError."""
        self._control.send(ORDER.pack(True, number))

    def records(self) -> list[Record]:
        """Return records since the last call; raises EOFError after the server's end."""
        found: list[Record] = []
        while True:
            try:
                data = os.read(self._records, READ_BYTES)
            except BlockingIOError:
                return found
            if data:
                self._received += data
                found += unpack(self._received)
            elif found:
                return found
            else:
                raise EOFError(f"the server for grammars ended with status {self._process.poll()}")

    def end(self, *, at_once: bool = False) -> None:
        """End the server and all its processes. Kill after `END_TIMEOUT_S`, or without delay if `at_once`."""
        self._control.close()
        try:
            self._process.wait(0.0 if at_once else END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # forked processes end with the server
            self._process.wait()
        os.close(self._records)
