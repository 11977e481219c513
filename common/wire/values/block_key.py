"""Keys of KV blocks: two texts share the keys of their common prefix, and no further keys.

    root     = SHA-256 of the model, its weights and its rounding, and of a salt.
    digest i = SHA-256(digest of the block before, or root ‖ tokens of block i as int32, little-endian).
    key i    = the first 16 bytes of digest i, exclusive or a constant of the block's group, 0 for group 0. The router
               knows the first 8.

So a key stands for a block's tokens and for all tokens before. The hash is SHA-256 because keys must not be made to
collide: a client with a colliding text would read another client's KV. The router, workers and memory servers all make
and compare keys by this module. A text has the same root in every pool, because the root leaves out the shape of
blocks (layers, heads, tokens a block).
"""

import json
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256

import numpy as np

from common.wire.values.fields import DIGEST_BYTES, KEY_BYTES, SHORT_KEY_BYTES
from common.wire.values.kv_layout import MAX_GROUPS, KVLayout
from common.wire.values.packing import ID_BYTES

VERSION = b"baton kv 2"
STRETCH_BLOCKS = 64
KEY = np.dtype(f"V{KEY_BYTES}")
_DIGESTS = [sha256(VERSION + b" group %d" % group).digest() for group in range(1, MAX_GROUPS)]
_MARKS = np.array([bytearray(KEY_BYTES), *(bytearray(digest[:KEY_BYTES]) for digest in _DIGESTS)], np.uint8)
"""A constant for each group. A block of a window or a state depends on all tokens before, like a key."""


def root_of(layout: KVLayout, salt: bytes = b"") -> bytes:
    """Return the start of every text's chain of digests: [32]. Texts of two salts (two tenants) share no key."""
    return sha256(b"\0".join((VERSION, _digest_of(layout) + sha256(salt).digest()))).digest()


@lru_cache(maxsize=16)
def _digest_of(layout: KVLayout) -> bytes:
    return sha256(json.dumps(layout.logical, separators=(",", ":")).encode()).digest()


def digests(parent: bytes, token_ids: bytes, block_size: int) -> list[bytes]:
    """Return a digest [32] of each full block of the packed `token_ids`; the text before has digest `parent`.

    Args:
        parent: digest of the block before, or the root.
    """
    block_bytes = block_size * ID_BYTES
    begins = range(0, len(token_ids) - block_bytes + 1, block_bytes)
    blocks = [token_ids[begin : begin + block_bytes] for begin in begins]
    return [parent := sha256(parent + block).digest() for block in blocks]


class TextDigests:
    """A cache of digests: a stretch of `STRETCH_BLOCKS` blocks seen lately costs a single hash.

    The cache's key is the SHA-256 of the digest before a stretch and the stretch's tokens. One thread at a time.
    """

    def __init__(self, block_size: int, max_stretches: int = 1024) -> None:
        self._block_size, self._max_stretches = block_size, max_stretches
        self._stretches: OrderedDict[bytes, list[bytes]] = OrderedDict()  # least recently used first

    def of(self, parent: bytes, token_ids: bytes) -> list[bytes]:
        """Return `digests` of a packed text, from its beginning or from the end of a stretch."""
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


def keys_in_group(keys: bytes, group: int | np.ndarray) -> bytes:
    """Turn packed keys of group 0 into keys of another group, or each of a group of its own, and back.

    Args:
        group: of all, or of each: [num_blocks] int.
    """
    marked: np.ndarray = np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES) ^ _MARKS[group]
    return marked.tobytes()


def short_keys_in_group(keys: "array[int]", group: int) -> "array[int]":
    """Turn short keys of group 0 into those of another group: [num_blocks]."""
    return array("Q", (np.frombuffer(keys, np.uint64) ^ _MARKS[group].view(np.uint64)[0]).tobytes())


def pack_keys(of_blocks: Sequence[bytes]) -> bytes:
    """Return the packed keys of digests: [num_blocks * 16]."""
    return np.frombuffer(b"".join(of_blocks), np.uint8).reshape(-1, DIGEST_BYTES)[:, :KEY_BYTES].tobytes()


def unpacked(keys: bytes) -> list[bytes]:
    """Split packed keys into keys of 16 bytes."""
    each: list[bytes] = np.frombuffer(keys, KEY).tolist()
    return each


def short_keys(of_blocks: Sequence[bytes]) -> "array[int]":
    """Return the router's keys of digests, as numbers: [num_blocks]."""
    packed = np.frombuffer(b"".join(of_blocks), np.uint8).reshape(-1, DIGEST_BYTES)[:, :SHORT_KEY_BYTES].tobytes()
    return unpack_short_keys(packed)


def unpack_short_keys(packed: bytes) -> "array[int]":
    """Return packed short keys as numbers: [num_blocks]."""
    keys = array("Q")
    keys.frombytes(packed)
    return keys
