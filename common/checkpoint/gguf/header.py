"""Header of a GGUF file: metadata, and place and type of every tensor.

Counts and lengths in a file are not trusted: nothing is read beyond the file or `MAX_HEADER_BYTES`, and no more values
than `MAX_ITEMS` are kept. So a damaged or hostile file costs bounded memory and gets an error with the file's name.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

from common.base.errors import ConfigError
from common.checkpoint.gguf.block_types import TYPES, BlockType, type_name

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 128 << 20
MAX_ITEMS = 8 << 20
"""Values of all arrays, metadata entries and tensors; Gemma's vocabulary has 1.3 million of them."""
MAX_DIMENSIONS = 4
MAX_SIDE = 1 << 40
FETCH = "fetch the file again"
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Numbers of metadata, by their type in a file, in the notation of `struct`."""
STRING, ARRAY = 8, 9

Value = bool | int | float | str | tuple[bool | int | float | str, ...]


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    path: Path
    type: BlockType
    shape: tuple[int, ...]  # from the outermost dimension to the innermost
    begin: int  # byte of the file

    @property
    def num_bytes(self) -> int:
        return self.type.bytes_of(math.prod(self.shape))


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata and tensors of a file."""

    metadata: Mapping[str, Value]
    tensors: Mapping[str, StoredTensor]


def read_header(path: Path) -> Header:
    """Return the header of a file; raises ConfigError for a file that is damaged, or of another kind."""
    try:
        with path.open("rb") as file:
            return _header(_Cursor(file, path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


class _Cursor:
    """Reader of a file's values, one behind the other."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.path = path
        self.num_bytes = file.seek(0, 2)
        file.seek(0)
        self._read = file.read
        self._num_read = 0
        self._most = min(self.num_bytes, MAX_HEADER_BYTES)
        self._items_left = MAX_ITEMS

    @property
    def num_read(self) -> int:
        return self._num_read

    def wrong(self, problem: str) -> ConfigError:
        """Return the error about the file."""
        return ConfigError(f"{self.path}: not a GGUF file that can be read: {problem}; {FETCH}")

    def count_items(self, count: int, least_bytes: int) -> None:
        """Raise ConfigError if `count` values of at least `least_bytes` are more than the file has, or too many."""
        if count * least_bytes > self.num_bytes - self._num_read:
            raise self.wrong(f"it says that {count} values follow, which {self.num_bytes} bytes have no room for")
        self._items_left -= count
        if self._items_left < 0:
            raise self.wrong(f"its header has more than {MAX_ITEMS} values")

    def take(self, num_bytes: int) -> bytes:
        if self._num_read + num_bytes > self._most:
            raise self._beyond()
        taken = self._read(num_bytes)
        self._num_read += num_bytes
        if len(taken) < num_bytes:
            raise self.wrong("it became shorter while it was read")
        return taken

    def numbers(self, form: str) -> tuple[bool | int | float, ...]:
        """Return numbers; `form` is in the notation of `struct`."""
        form = f"<{form}"
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def whole(self, form: str) -> int:
        (number,) = self.numbers(form)
        return int(number)

    def text(self) -> str:
        """Return a string; bytes that are no UTF-8 are replaced, as in tokens of old files."""
        return self.take(int.from_bytes(self.take(8), "little")).decode("utf-8", "replace")

    def value(self) -> Value:
        """Return a value of metadata, behind its type."""
        kind = self.whole("I")
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self._array()
        (number,) = self.numbers(self._form(kind))
        return number

    def _array(self) -> Value:
        kind, count = self.whole("I"), self.whole("Q")
        if kind == STRING:
            self.count_items(count, 8)
            return tuple(self._texts(count))
        form = self._form(kind)
        self.count_items(count, struct.calcsize(f"<{form}"))
        return self.numbers(f"{count}{form}") if count else ()

    def _texts(self, count: int) -> Iterator[str]:
        """Yield strings like `text`, written out because vocabularies have hundreds of thousands."""
        read, num_read, most = self._read, self._num_read, self._most
        for _ in range(count):
            num_bytes = int.from_bytes(read(8), "little")
            num_read += 8 + num_bytes
            if num_read > most:
                raise self._beyond()
            yield read(num_bytes).decode("utf-8", "replace")
        self._num_read = num_read

    def _beyond(self) -> ConfigError:
        if self._most < self.num_bytes:
            return self.wrong(f"its header is longer than {MAX_HEADER_BYTES} bytes")
        return self.wrong(f"it ends after {self.num_bytes} bytes, inside of its header")

    def _form(self, kind: int) -> str:
        if kind not in FORMATS:
            raise self.wrong(f"its metadata has a value of the unknown type {kind}")
        return FORMATS[kind]


def _header(cursor: _Cursor) -> Header:
    num_tensors, num_entries = _opening(cursor)
    cursor.count_items(num_entries, 8 + 4 + 1)
    metadata: dict[str, Value] = {}
    for _ in range(num_entries):
        key = cursor.text()
        if key in metadata:
            raise cursor.wrong(f"its metadata has {key!r:.80} twice")
        metadata[key] = cursor.value()
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
        raise cursor.wrong(f"general.alignment = {alignment!r:.80}")
    cursor.count_items(num_tensors, 8 + 4 + 8 + 4 + 8)
    return Header(metadata, _tensors(cursor, num_tensors, alignment))


def _opening(cursor: _Cursor) -> tuple[int, int]:
    """Return the numbers of tensors and of metadata entries."""
    magic = cursor.take(min(4, cursor.num_bytes))
    if magic != MAGIC:
        raise cursor.wrong(f"it begins with {magic!r}")
    version = cursor.whole("I")
    if version not in VERSIONS:
        if version & 0xFFFF == 0:
            raise ConfigError(f"{cursor.path}: big endian; serve a file written for little endian")
        raise ConfigError(
            f"{cursor.path}: GGUF version {version}, supported are {VERSIONS[0]} and {VERSIONS[1]}; "
            "convert the model again, or fetch a newer file"
        )
    return cursor.whole("Q"), cursor.whole("Q")


def _tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, StoredTensor]:
    entries = [_entry(cursor) for _ in range(count)]
    first = -(-cursor.num_read // alignment) * alignment
    _refuse_types(cursor.path, [(name, kind) for name, _, kind, _ in entries])
    tensors: dict[str, StoredTensor] = {}
    for name, shape, kind, offset in entries:
        tensor = StoredTensor(cursor.path, TYPES[kind], shape, first + offset)
        if name in tensors:
            raise cursor.wrong(f"it has {name!r:.80} twice")
        if shape[-1] % tensor.type.num_elements:
            raise cursor.wrong(f"{name!r:.80} is {list(shape)}, whose rows are no whole blocks of {tensor.type.name}")
        end = tensor.begin + tensor.num_bytes
        if end > cursor.num_bytes:
            raise cursor.wrong(f"it ends after {cursor.num_bytes} bytes, and {name!r:.80} would end at {end}")
        tensors[name] = tensor
    _refuse_overlaps(cursor, tensors)
    return tensors


def _refuse_overlaps(cursor: _Cursor, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise ConfigError if a tensor begins inside another."""
    in_order = sorted(tensors.items(), key=lambda each: each[1].begin)
    for (name, tensor), (other, behind) in pairwise(in_order):
        if tensor.begin + tensor.num_bytes > behind.begin:
            raise cursor.wrong(f"{name!r:.80} and {other!r:.80} have bytes in common")


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Return a tensor's name, shape, type and place behind the header."""
    name, num_dimensions = cursor.text(), cursor.whole("I")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.wrong(f"{name!r:.80} has {num_dimensions} dimensions")
    shape = tuple(int(side) for side in reversed(cursor.numbers(f"{num_dimensions}Q")))
    if not all(1 <= side <= MAX_SIDE for side in shape):
        raise cursor.wrong(f"{name!r:.80} is {list(shape)}")
    return name, shape, cursor.whole("I"), cursor.whole("Q")


def _refuse_types(path: Path, tensors: list[tuple[str, int]]) -> None:
    """Raise ConfigError naming types that cannot be read, each with its first tensor."""
    refused = {kind: name for name, kind in reversed(tensors) if kind not in TYPES}
    if refused:
        found = ", ".join(f"{name} is {type_name(kind)}" for kind, name in sorted(refused.items()))
        raise ConfigError(
            f"{path}: {found:.300}; supported are {', '.join(each.name for each in TYPES.values())}; serve another "
            "file of this model, such as Q4_K_M, Q5_K_M, Q6_K or Q8_0"
        )
