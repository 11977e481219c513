"""Keys of blocks of KV, which two texts share as far as they are equal, and no further.

    root     = SHA-256 of all that KV depends on beside tokens (model, weights, rounding), and of a salt
    digest i = SHA-256(digest of the block before, or root ‖ tokens of block i as int32, little-endian)
    key i    = the first 16 bytes of digest i, of which the router knows the first 8

So a key stands for a block's tokens and for all before them. SHA-256, as whoever finds two texts of one key reads
another's: keys must not be made to collide. Router, workers and memory servers make and compare them by this module.
How a pool stores KV (layers and heads of a block, tokens a block) is no part of the root: a text has one root wherever
it lies.
"""

import json
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256

import numpy as np

from common.wire.values.fields import DIGEST_BYTES, ID_BYTES, KEY_BYTES, SHORT_KEY_BYTES
from common.wire.values.kv_layout import KVLayout

VERSION = b"baton kv 2"
STRETCH_BLOCKS = 64


def root_of(layout: KVLayout, salt: bytes = b"") -> bytes:
    """Where the chain of every text begins: [32]. Texts of two salts, as of two tenants, share nothing."""
    return sha256(b"\0".join((VERSION, _digest_of(layout) + sha256(salt).digest()))).digest()


@lru_cache(maxsize=16)
def _digest_of(layout: KVLayout) -> bytes:
    return sha256(json.dumps(layout.logical, separators=(",", ":")).encode()).digest()


def digests(parent: bytes, token_ids: bytes, block_size: int) -> list[bytes]:
    """Of the full blocks of `token_ids`, packed, which follow the block of digest `parent`, or the root: each [32]."""
    block_bytes = block_size * ID_BYTES
    begins = range(0, len(token_ids) - block_bytes + 1, block_bytes)
    blocks = [token_ids[begin : begin + block_bytes] for begin in begins]
    return [parent := sha256(parent + block).digest() for block in blocks]


class TextDigests:
    """The same of texts that begin as others did lately: of a stretch of blocks that is known one hash is made.

    A stretch is known by the SHA-256 of the digest before it and its tokens. One thread at a time.
    """

    def __init__(self, block_size: int, max_stretches: int = 1024) -> None:
        self._block_size, self._max_stretches = block_size, max_stretches
        self._stretches: OrderedDict[bytes, list[bytes]] = OrderedDict()  # by last use

    def of(self, parent: bytes, token_ids: bytes) -> list[bytes]:
        """`digests` of a text, packed, from its beginning or from where a stretch ended."""
        found = list[bytes]()
        stretch_bytes = STRETCH_BLOCKS * self._block_size * ID_BYTES
        for begin in range(0, len(token_ids), stretch_bytes):
            stretch = token_ids[begin : begin + stretch_bytes]
            is_whole = len(stretch) == stretch_bytes
            found += self._stretch(parent, stretch) if is_whole else digests(parent, stretch, self._block_size)
            parent = found[-1] if found else parent
        return found

    def _stretch(self, parent: bytes, token_ids: bytes) -> list[bytes]:
        name = sha256(parent + token_ids).digest()
        known = self._stretches.get(name)
        if known is None:
            known = self._stretches[name] = digests(parent, token_ids, self._block_size)
            if len(self._stretches) > self._max_stretches:
                self._stretches.popitem(last=False)
        else:
            self._stretches.move_to_end(name)
        return known


def pack_keys(of_blocks: Sequence[bytes]) -> bytes:
    """Keys of digests, as they travel: [num_blocks * 16]."""
    return np.frombuffer(b"".join(of_blocks), np.uint8).reshape(-1, DIGEST_BYTES)[:, :KEY_BYTES].tobytes()


def short_keys(of_blocks: Sequence[bytes]) -> "array[int]":
    """Of digests, as numbers: [num_blocks]."""
    packed = np.frombuffer(b"".join(of_blocks), np.uint8).reshape(-1, DIGEST_BYTES)[:, :SHORT_KEY_BYTES].tobytes()
    return unpack_short_keys(packed)


def unpack_short_keys(packed: bytes) -> "array[int]":
    """As they travel: [num_blocks]."""
    keys = array("Q")
    keys.frombytes(packed)
    return keys
