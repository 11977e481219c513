"""What a worker and the processes that follow grammars for it say to one another, and the memory of masks.

A worker writes messages into a pipe of each process: its grammar, then jobs and ends of texts. All processes, and the
server that forks them, write records into one pipe of the worker. Each is written in one piece of at most PIPE_BUF
bytes, so that no record is torn by another or by its writer's end.
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
"""To the server: whether a process is to end, and its number."""
HEADER = struct.Struct("<BIi?H")
"""Kind, process, number, whether the process is heavy, bytes of what is told."""
MAX_TOLD_BYTES = 2048
READ_BYTES = 1 << 16
MAX_PLACES = 1024
"""Masks that have been asked for and are not taken yet; further texts wait."""


class Kind(IntEnum):
    """What a record says."""

    READY = 0  # the server has the model's tokens, after so many milliseconds; a warning may be told
    FAILED = 1  # the server never will; why is told
    FORKED = 2  # a process
    ENDED = 3  # a process, with the status that `os.waitpid` gave, or why it could not be forked
    MASK = 4  # the mask of a text is in its place
    OVER = 5  # nothing may follow a text
    PROBLEM = 6  # a text does not go on; why is told


class Record(NamedTuple):
    """What a process or the server says."""

    kind: Kind
    process: int = 0
    number: int = 0  # a text, an exit status or a time
    told: str = ""
    is_heavy: bool = False  # a process that is slow or large

    def pack(self) -> bytes:
        told = self.told.encode(errors="replace")[:MAX_TOLD_BYTES]
        return HEADER.pack(self.kind, self.process, self.number, self.is_heavy, len(told)) + told


def unpack(data: bytearray) -> Iterator[Record]:
    """Take the records that are complete from the front of `data`."""
    at = 0
    while len(data) >= at + HEADER.size:
        kind, process, number, is_heavy, num_bytes = HEADER.unpack_from(data, at)
        end = at + HEADER.size + num_bytes
        if len(data) < end:
            break
        told = data[at + HEADER.size : end].decode(errors="replace")
        at = end
        yield Record(Kind(kind), process, number, told, is_heavy)
    del data[:at]


class Job(NamedTuple):
    """What a process is to do for a text; with `place` -1 the text has ended."""

    text: int
    place: int = -1  # of its mask
    stop_token_ids: Sequence[int] = ()
    token_ids: Sequence[int] = ()

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb([self.text, self.place, list(self.stop_token_ids), list(self.token_ids)])
        return packed


Message: TypeAlias = "str | Job"
"""A process gets a grammar first, and another when the texts under that one have ended."""


def pack_grammar(grammar: str) -> bytes:
    packed: bytes = msgpack.packb(grammar)
    return packed


def messages(pipe: int) -> Iterator[Message]:
    """Read a process's messages until the other end is closed."""
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    while data := os.read(pipe, READ_BYTES):
        unpacker.feed(data)
        for message in unpacker:
            yield message if isinstance(message, str) else Job(*message)


class Masks:
    """A mask for each place, in memory that may be shared."""

    def __init__(self, memory: mmap, mask_bytes: int) -> None:
        self.memory, self.mask_bytes = memory, mask_bytes
        self._begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def address(self, place: int) -> int:
        return self._begin + place * self.mask_bytes

    def read(self, place: int) -> bytes:
        """Copy the mask."""
        return self.memory[place * self.mask_bytes : (place + 1) * self.mask_bytes]

    def write(self, place: int, mask: bytes | bytearray) -> None:
        self.memory[place * self.mask_bytes : (place + 1) * self.mask_bytes] = mask


def mask_bytes_of(vocab: int) -> int:
    """Bytes of a mask: a bit for each token, in words of 32."""
    return -(-vocab // 32) * 4
