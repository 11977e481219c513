"""Messages between a worker and the processes that follow grammars, and shared memory for masks.

The worker writes messages into a pipe per process: a grammar, then jobs and ends of texts. All processes, and the
server that forks processes, write records into a single pipe of the worker. A record is a single write of at most
PIPE_BUF bytes, so neither other records nor a writer's death can split a record.
"""

import ctypes
import os
import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from mmap import mmap
from typing import NamedTuple, TypeAlias

import msgpack

ORDER = struct.Struct("<?I")
"""Order to the server: a flag to kill instead of fork, and the process number."""
HEADER = struct.Struct("<BIi?H")
"""Kind, process, number, flag of a heavy process, bytes of text."""
MAX_TEXT_BYTES = 2048
READ_BYTES = 1 << 16
MAX_PLACES = 1024
"""Most masks requested and not taken yet; further texts wait."""


class Kind(IntEnum):
    """Kind of a record."""

    READY = 0  # server: tokens loaded; `number` has milliseconds, `text` warnings
    FAILED = 1  # server: tokens cannot be loaded; `text` has the reason
    FORKED = 2  # server: a process was forked
    ENDED = 3  # server: a process ended with status `number`, or `text`: no fork
    MASK = 4  # the text's mask is written
    OVER = 5  # no token may follow the text
    PROBLEM = 6  # the text cannot go on; `text` has the reason


class Record(NamedTuple):
    """A message from a process or the server."""

    kind: Kind
    process: int = 0
    number: int = 0  # a text, a wait status or milliseconds
    text: str = ""
    is_heavy: bool = False  # the process is slow or large

    def pack(self) -> bytes:
        text = self.text.encode(errors="replace")[:MAX_TEXT_BYTES]
        return HEADER.pack(self.kind, self.process, self.number, self.is_heavy, len(text)) + text


def unpack(data: bytearray) -> Iterator[Record]:
    """Yield complete records from the front of `data`; then remove the records from `data`."""
    at = 0
    while len(data) >= at + HEADER.size:
        kind, process, number, is_heavy, num_bytes = HEADER.unpack_from(data, at)
        end = at + HEADER.size + num_bytes
        if len(data) < end:
            break
        text = data[at + HEADER.size : end].decode(errors="replace")
        at = end
        yield Record(Kind(kind), process, number, text, is_heavy)
    del data[:at]


class Job(NamedTuple):
    """A job of a process: follow tokens of a text and write its mask. `place` -1: the text has ended."""

    text: int
    place: int = -1  # the mask's place in `Masks`
    stop_token_ids: Sequence[int] = ()
    token_ids: Sequence[int] = ()

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb([self.text, self.place, list(self.stop_token_ids), list(self.token_ids)])
        return packed


Message: TypeAlias = "str | Job"
"""A grammar or a job. A process gets a grammar first, and a new grammar only after the end of all texts."""


def pack_grammar(grammar: str) -> bytes:
    packed: bytes = msgpack.packb(grammar)
    return packed


def messages(pipe: int) -> Iterator[Message]:
    """Yield a process's messages until the worker closes the pipe."""
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    while data := os.read(pipe, READ_BYTES):
        unpacker.feed(data)
        for message in unpacker:
            yield message if isinstance(message, str) else Job(*message)


class Masks:
    """Masks by place, in memory that may be shared."""

    def __init__(self, memory: mmap, mask_bytes: int) -> None:
        self.memory, self.mask_bytes = memory, mask_bytes
        self._begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def address(self, place: int) -> int:
        return self._begin + place * self.mask_bytes

    def read(self, place: int) -> bytes:
        """Return a copy of the mask."""
        return self.memory[place * self.mask_bytes : (place + 1) * self.mask_bytes]

    def write(self, place: int, mask: bytes | bytearray) -> None:
        self.memory[place * self.mask_bytes : (place + 1) * self.mask_bytes] = mask


def mask_bytes_of(vocab: int) -> int:
    """Return the bytes of a mask: a bit for each token, in words of 32 bits."""
    return -(-vocab // 32) * 4
