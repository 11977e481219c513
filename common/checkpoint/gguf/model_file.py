"""A model in GGUF: the parts of a split file together, and look-ups in the metadata."""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.base.errors import ConfigError
from common.checkpoint.gguf.header import Header, StoredTensor, Value, read_header

PART = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
MAX_PARTS = 1000
SUFFIX = ".gguf"
_SHOWN = 5


def is_gguf(path: Path) -> bool:
    """Tell whether a path names a GGUF file, existing or not, by the end of the name."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def model_name(path: Path) -> str:
    """Return the name of a directory, or that of a GGUF file without its end and the number of a part."""
    if not is_gguf(path):
        return path.resolve().name
    part = PART.fullmatch(path.name)
    return part["name"] if part else path.stem


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """Metadata and tensors of a model; `path` is the file, of several the first."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, StoredTensor]

    def text(self, key: str) -> str | None:
        """Return a string; None without one."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value

    def whole(self, key: str) -> int | None:
        """Return a whole number; None without one."""
        value = self.metadata.get(key)
        if value is not None and type(value) is not int:
            raise self.wrong(key, value, "a whole number")
        return value

    def decimal(self, key: str) -> float | None:
        """Return a number as config.json would have it, None without one."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, value, "a number")
        return _shortest(float(value))

    def flag(self, key: str) -> bool | None:
        """Return true or false; None without a value."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def texts(self, key: str) -> tuple[str, ...] | None:
        """Return an array of strings; None without one."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, tuple) or not all(isinstance(each, str) for each in value):
            raise self.wrong(key, value, "an array of strings")
        return tuple(map(str, value))

    def wholes(self, key: str) -> tuple[int, ...] | None:
        """Return an array of whole numbers; None without one."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, tuple) or not all(type(each) is int for each in value):
            raise self.wrong(key, value, "an array of whole numbers")
        return tuple(map(int, value))

    def numbers(self, key: str) -> tuple[float, ...] | None:
        """Return an array of numbers; None without one."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, tuple) or any(isinstance(each, str) for each in value):
            raise self.wrong(key, value, "an array of numbers")
        return tuple(map(float, value))

    def wrong(self, key: str, value: object, wanted: str) -> ConfigError:
        """Return the error about a value of the metadata."""
        return ConfigError(f"{self.path}: {key} = {value!r:.80}, {wanted} is needed; serve another file of this model")


def read_gguf(path: Path) -> GGUFModel:
    """Return a model of a file, or of all parts if `path` is one of them; raises ConfigError."""
    first, *others = parts_of(path)
    header = read_header(first)
    _check_kind(first, header)
    tensors = dict(header.tensors)
    for other in others:
        further = read_header(other).tensors
        twice = sorted(tensors.keys() & further.keys())
        if twice:
            raise ConfigError(f"{other}: {twice[0]} is in another part too; fetch all parts again")
        tensors |= further
    _check_parts(first, header, 1 + len(others), len(tensors))
    return GGUFModel(first, header.metadata, tensors)


def parts_of(path: Path) -> list[Path]:
    """Return all parts of a split file in their order, or the file itself; raises ConfigError for missing parts."""
    found = PART.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found["count"])
    if not 1 <= int(found["number"]) <= count <= MAX_PARTS:
        raise ConfigError(f"{path}: the name is that of part {found['number']} of {count}, at most {MAX_PARTS} can be")
    suffix = path.name[-len(SUFFIX) :]
    parts = [path.with_name(f"{found['name']}-{number:05}-of-{count:05}{suffix}") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise ConfigError(
            f"{path}: parts are missing: {', '.join(missing[:_SHOWN])}{more}; put all {count} into one directory"
        )
    return parts


def _check_kind(path: Path, header: Header) -> None:
    """Raise ConfigError for files that hold something beside a model."""
    kind, architecture = header.metadata.get("general.type", "model"), header.metadata.get("general.architecture")
    if kind == "mmproj" or architecture == "clip":
        raise ConfigError(f"{path}: holds what a model sees or hears with (mmproj); serve the model's own file")
    if kind != "model":
        raise ConfigError(
            f"{path}: general.type = {kind!r:.80}, only 'model' can be served; serve the model's own file"
        )


def _check_parts(path: Path, header: Header, num_parts: int, num_tensors: int) -> None:
    """Raise ConfigError if the metadata tells of other parts or tensors than there are."""
    count = header.metadata.get("split.count", num_parts)
    if count not in (0, num_parts):
        raise ConfigError(
            f"{path}: part {header.metadata.get('split.no', 0)!r:.20} of {count!r:.20} (split.no, from 0); name the "
            "files as their writer did, NAME-00001-of-00005.gguf and so on, and serve the first"
        )
    told = header.metadata.get("split.tensors.count", num_tensors)
    if count and told != num_tensors:
        raise ConfigError(
            f"{path}: {num_tensors} tensors in all parts, split.tensors.count = {told!r:.20}; fetch all parts again"
        )


def _shortest(value: float) -> float:
    """Return the number with the fewest decimal digits that is the same in fp32, as files hold numbers."""
    try:
        stored = struct.pack("<f", value)
    except OverflowError:
        return value
    for digits in range(1, 9):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == stored:
            return short
    return value
