"""Cache of encoded texts, piece by piece.

Texts with a common beginning, such as the turns of a conversation, share pieces up to their difference (`text_cuts`). A
piece is found by a hash of its characters and of the request's `cache_salt`. Eviction is by last use.
"""

import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from threading import Lock

from router.text.prompts import TokenIds
from router.text.text_cuts import PIECE_CHARS

ENTRY_BYTES = 200
"""Dictionary overhead of an entry, besides key and value."""


@dataclass(slots=True)
class TextCounts:
    """Tokens of texts, found in the cache or encoded."""

    num_found: int = 0
    num_encoded: int = 0

    def __add__(self, other: "TextCounts") -> "TextCounts":
        return TextCounts(self.num_found + other.num_found, self.num_encoded + other.num_encoded)


class TextCache:
    """Thread-safe cache of tokens, by hash of a piece, within `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.counts = TextCounts()
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._ids: OrderedDict[bytes, TokenIds] = OrderedDict()  # by last use
        self._lock = Lock()

    def ids(self, pieces: Sequence[str], salt: str, encode: Callable[[list[str]], list[TokenIds]]) -> TokenIds:
        """Return the ids of a text in pieces; `encode` gets all unknown pieces, each once."""
        names = {piece: _name(salt, piece) for piece in pieces if len(piece) >= PIECE_CHARS}
        known = self._found(pieces, names)
        unknown = [piece for piece in dict.fromkeys(pieces) if piece not in known]
        encoded = dict(zip(unknown, encode(unknown), strict=True)) if unknown else {}
        known |= encoded
        ids = array("i")
        for piece in pieces:
            ids.extend(known[piece])
        self._keep({names[piece]: of_piece for piece, of_piece in encoded.items() if piece in names})
        num_encoded = sum(map(len, encoded.values()))
        self.count(TextCounts(len(ids) - num_encoded, num_encoded))
        return ids

    def count(self, more: TextCounts) -> None:
        with self._lock:
            self.counts += more

    def _found(self, pieces: Sequence[str], names: Mapping[str, bytes]) -> dict[str, TokenIds]:
        found = {}
        with self._lock:
            for piece in pieces:
                name = names.get(piece, b"")
                ids = self._ids.get(name)
                if ids is not None:
                    self._ids.move_to_end(name)
                    found[piece] = ids
        return found

    def _keep(self, encoded: Mapping[bytes, TokenIds]) -> None:
        with self._lock:
            for name, ids in encoded.items():
                if name not in self._ids:
                    self._ids[name] = ids
                    self.num_bytes += _bytes_of(name, ids)
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= _bytes_of(*self._ids.popitem(last=False))


def _name(salt: str, piece: str) -> bytes:
    """Return a salted SHA-256, because a collision would give a client another client's tokens."""
    return sha256(sha256(salt.encode()).digest() + piece.encode()).digest()


def _bytes_of(name: bytes, ids: TokenIds) -> int:
    return ENTRY_BYTES + sys.getsizeof(name) + sys.getsizeof(ids)
