"""Message frames between the router and its helper processes; helpers import little besides this module."""

import struct
from collections.abc import Iterator
from enum import IntEnum
from io import BufferedReader, BufferedWriter

BODY = struct.Struct("<BQQ")
"""Request to a reader: kind, body bytes, and the longest prompt with output in tokens."""
REPLY = struct.Struct("<QQQ")
"""Reply of a reader: reply bytes, then tokens of the body's texts found in the cache, and tokens encoded."""
MODEL = struct.Struct("<Q")
"""First message to a chat process: bytes of the packed model (`chat_model`)."""
GRAMMAR = struct.Struct("<QQ")
"""To and from the grammar process: the grammar's number, and bytes that follow."""


class Kind(IntEnum):
    """Kind of a request body, by endpoint."""

    COMPLETION = 0
    TOKENIZE = 1
    DETOKENIZE = 2
    CHAT = 3
    RESPONSE = 4


CONVERSATIONS = (Kind.CHAT, Kind.RESPONSE)
"""Kinds with prompts written by the model's chat template."""


def bodies(requests: BufferedReader) -> Iterator[tuple[Kind, bytearray, int]]:
    """Yield kind, body, and the longest prompt with output in tokens, until the router hangs up."""
    while header := requests.read(BODY.size):
        kind, num_bytes, max_model_len = BODY.unpack(header)
        data = bytearray(num_bytes)
        if requests.readinto(data) < num_bytes:
            return
        yield Kind(kind), data, max_model_len


def send(replies: BufferedWriter, reply: bytes, num_found: int = 0, num_encoded: int = 0) -> None:
    """Send the result for a body, with tokens of its texts found in the cache or encoded."""
    replies.write(REPLY.pack(len(reply), num_found, num_encoded))
    replies.write(reply)
    replies.flush()
