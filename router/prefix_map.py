"""What lies where, as far as the router can tell: in which pool of KV blocks which beginnings of texts were computed.

A text's beginnings are its first 256 tokens, its first 512, and so on, each with a key that stands for all before it.
What was sent to a worker is taken to be in its pool until as much else was sent there as the pool holds. Nobody is told
when a block goes; whoever is sent to the wrong pool computes what it does not find, and from then on it is there.
"""

from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from hashlib import blake2b

STRIDE_TOKENS = 256
Beginnings = Sequence[bytes]
"""Keys of a text, shortest first."""
PoolName = tuple[str, int]
"""Id and epoch of who owns it."""


def beginnings_of(token_ids: Sequence[int], salt: bytes) -> Beginnings:
    """Texts of two salts have none in common."""
    packed, chain, keys = memoryview(array("i", token_ids)), blake2b(salt, digest_size=16), []
    for end in range(STRIDE_TOKENS, len(token_ids) + 1, STRIDE_TOKENS):
        chain.update(packed[end - STRIDE_TOKENS : end])
        keys.append(chain.copy().digest())
    return keys


class PrefixMap:
    """Of all pools."""

    def __init__(self) -> None:
        self._pools: dict[PoolName, OrderedDict[bytes, None]] = {}  # who was sent last is last

    def num_known(self, pool: PoolName, beginnings: Beginnings) -> int:
        """Tokens of a text that are there, as far as can be told."""
        known = self._pools.get(pool, ())
        count = next((number for number, key in enumerate(beginnings) if key not in known), len(beginnings))
        return count * STRIDE_TOKENS

    def note(self, pool: PoolName, beginnings: Beginnings, num_tokens: int) -> None:
        """A text is computed in a pool that holds so many tokens."""
        known = self._pools.setdefault(pool, OrderedDict())
        for key in reversed(beginnings):  # without its beginning the rest is not found
            known[key] = None
            known.move_to_end(key)
        while len(known) > num_tokens // STRIDE_TOKENS:
            known.popitem(last=False)

    def keep(self, pools: Collection[PoolName]) -> None:
        """All others are gone."""
        self._pools = {pool: known for pool, known in self._pools.items() if pool in pools}
