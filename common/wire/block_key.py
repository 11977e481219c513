"""By what blocks of KV are known: keys that two texts share as far as they are equal, and no further.

    root     = SHA-256 of all that KV depends on beside tokens, and of a salt
    digest i = SHA-256(digest of the block before, or root ‖ tokens of block i as int32, little-endian)
    key i    = the first 16 bytes of digest i

So a key stands for a block's tokens and for all before them. SHA-256, as whoever finds two texts of one key reads
another's: keys must not be made to collide. Router, workers and memory servers make and compare them by this module.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import sha256

from common.wire.fields import ID_BYTES, KEY_BYTES
from common.wire.kv_layout import KVLayout

VERSION = b"baton kv 1"


def root_of(layout: KVLayout, salt: bytes = b"") -> bytes:
    """Where the chain of every text begins: [32]. Texts of two salts, as of two tenants, share nothing."""
    described = json.dumps(asdict(layout), sort_keys=True, separators=(",", ":")).encode()
    return sha256(b"\0".join((VERSION, sha256(described).digest() + sha256(salt).digest()))).digest()


def digests(parent: bytes, token_ids: bytes, block_size: int) -> list[bytes]:
    """Of the full blocks of `token_ids`, packed, which follow the block of digest `parent`, or the root: each [32]."""
    block_bytes, found = block_size * ID_BYTES, []
    for begin in range(0, len(token_ids) - block_bytes + 1, block_bytes):
        parent = sha256(parent + token_ids[begin : begin + block_bytes]).digest()
        found.append(parent)
    return found


def pack_keys(of_blocks: Sequence[bytes]) -> bytes:
    """Keys of digests, as they travel: [num_blocks * 16]."""
    return b"".join([digest[:KEY_BYTES] for digest in of_blocks])
