"""What goes before each message between the router and the processes beside it; they import this, and little else."""

import struct
from collections.abc import Iterator
from enum import IntEnum
from io import BufferedReader, BufferedWriter

BODY = struct.Struct("<BQQ")
"""To a process that reads: kind and bytes of the body that follows, and the longest prompt with its output, tokens."""
REPLY = struct.Struct("<QQQ")
"""From it: bytes that follow; tokens of the body's texts that were found in its cache, and that were encoded."""
MODEL = struct.Struct("<Q")
"""To a process for chats, before all else: bytes that follow, what it is to know of the model (`chat_model`)."""
GRAMMAR = struct.Struct("<QQ")
"""To and from the process for grammars: the number of one, and bytes that follow."""


class Kind(IntEnum):
    """What a body asks for."""

    COMPLETION = 0
    TOKENIZE = 1
    DETOKENIZE = 2
    CHAT = 3
    RESPONSE = 4


CONVERSATIONS = (Kind.CHAT, Kind.RESPONSE)
"""Kinds whose prompts the model's chat template writes."""


def bodies(requests: BufferedReader) -> Iterator[tuple[Kind, bytearray, int]]:
    """What a process is to read, until nobody is there any more: kind, body, and the longest prompt with its output."""
    while header := requests.read(BODY.size):
        kind, num_bytes, max_model_len = BODY.unpack(header)
        data = bytearray(num_bytes)
        if requests.readinto(data) < num_bytes:
            return
        yield Kind(kind), data, max_model_len


def send(replies: BufferedWriter, reply: bytes, num_found: int = 0, num_encoded: int = 0) -> None:
    """What a process has read, and tokens of its texts."""
    replies.write(REPLY.pack(len(reply), num_found, num_encoded))
    replies.write(reply)
    replies.flush()
