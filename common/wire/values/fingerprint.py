"""Fingerprints of model files, so processes with different models notice the difference when they connect."""

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from common.base.errors import ConfigError
from common.base.json_file import QUANTIZATION_FILES
from common.checkpoint.gguf.config import config_of
from common.checkpoint.gguf.model_file import is_gguf, parts_of, read_gguf
from common.checkpoint.gguf.tokenizer import tokenizer_entries
from common.checkpoint.tensor_header import read_header

_SAMPLES = 4
"""Most pieces read of a tensor; fewer if the checkpoint has very many tensors."""
_SAMPLE_BYTES = 4096
_MAX_SAMPLES = 8192
_PER_TASK = 32
"""Most tensors read one behind the other, because handing them to threads takes longer than cached reads."""
_NUM_READERS = 16
"""Threads: on a disk with a cold cache each thread waits for a sample."""
MAX_PLACE = 120
"""Characters of a path in a description, its last ones."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a file: name, dtype and shape from the header, and the file's bytes `[begin, end)`."""

    name: str
    described: str
    begin: int
    end: int


def tokenizer_fingerprint(path: Path) -> str:
    """Return 16 hex digits that identify tokenizer.json, or a GGUF file's tokenizer.

    Raises ConfigError without such a file.
    """
    if is_gguf(path):
        return hashlib.sha256(repr(tokenizer_entries(read_gguf(path))).encode()).hexdigest()[:16]
    path = path / "tokenizer.json"
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; a model directory needs tokenizer.json") from None


def files_described(path: Path) -> str:
    """Return where a model's files are, how many, their size and the time of the last change, in printable ASCII.

    Only files that make the model's fingerprint count; "" beside an unreadable one.
    """
    try:
        files = parts_of(path) if is_gguf(path) else [*_configs(path), *path.glob("*.safetensors")]
        stats = [file.stat() for file in files]
    except (OSError, ConfigError):
        return ""
    changed = datetime.fromtimestamp(max(stat.st_mtime for stat in stats), UTC).isoformat(" ", "seconds")
    size_gb = sum(stat.st_size for stat in stats) / 1e9
    place = ascii(str(path.resolve()))[1:-1]
    return f"{place[-MAX_PLACE:]}, {len(files)} files of {size_gb:.3f} GB, last changed {changed}"


def model_fingerprint(path: Path) -> str:
    """Return 16 hex digits that identify a model by configuration and samples of every tensor; raises ConfigError.

    Tensors are sampled because reading all of a large checkpoint takes longer than loading the checkpoint. The samples
    are a tensor's beginning, its end and two pieces between, 4 KiB each, so a change of any whole tensor shows. The
    file of a tensor, and the place there, make no difference. Of a GGUF file, metadata stands for config.json.
    """
    try:
        config, headers = _of_gguf(path) if is_gguf(path) else _of_directory(path)
        num_tensors = sum(len(tensors) for _, tensors in headers)
        num_samples = max(1, min(_SAMPLES, _MAX_SAMPLES // max(1, num_tensors)))
        with ThreadPoolExecutor(_NUM_READERS, "fingerprint") as readers:
            sampled = [each for file, tensors in headers for each in _sampled(readers, file, tensors, num_samples)]
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}; a model directory needs config.json") from None
    digest = hashlib.sha256(config)
    for each in sorted(sampled):
        digest.update(each)
    return digest.hexdigest()[:16]


def chosen_fingerprint(model: str, quantization: str, head: str) -> str:
    """Return what the router and its workers must agree on: a model's fingerprint, and how it is to be held.

    A choice of `model.quantization` other than auto, and of `model.head` other than keep, counts as another model.
    Workers on different devices may agree and hold different numbers.
    """
    choices = [] if quantization == "auto" else [quantization]
    choices += [] if head == "keep" else [f"head {head}"]
    return _joined(model, choices)


def held_fingerprint(model: str, codes: str) -> str:
    """Return what weights and KV are shared by: a model's fingerprint, and the codes in which matrices are held.

    The codes determine keys and values, whether a worker was asked for them or chose them for its device.

    Args:
        codes: "" if no matrix is quantized.
    """
    return _joined(model, [f"codes {codes}"] if codes else [])


def _joined(fingerprint: str, more: list[str]) -> str:
    """Return another fingerprint for each list of texts; the same for none."""
    return hashlib.sha256("\0".join([fingerprint, *more]).encode()).hexdigest()[:16] if more else fingerprint


def _of_directory(path: Path) -> tuple[bytes, list[tuple[Path, list[_Stored]]]]:
    """Return the configuration, and the tensors of each file."""
    config = b"".join(file.read_bytes() for file in _configs(path))
    return config, [(file, _header(file)) for file in sorted(path.glob("*.safetensors"))]


def _configs(path: Path) -> list[Path]:
    """Return the configuration's files."""
    return [path / "config.json", *(path / name for name in QUANTIZATION_FILES if (path / name).is_file())]


def _of_gguf(path: Path) -> tuple[bytes, list[tuple[Path, list[_Stored]]]]:
    """Return the settings in the metadata, and the tensors of each part of a file."""
    model = read_gguf(path)
    files: dict[Path, list[_Stored]] = {}
    for name, tensor in model.tensors.items():
        stored = _Stored(name, f"{tensor.type.name} {tensor.shape}", tensor.begin, tensor.begin + tensor.num_bytes)
        files.setdefault(tensor.path, []).append(stored)
    return json.dumps(config_of(model), sort_keys=True).encode(), list(files.items())


def _header(path: Path) -> list[_Stored]:
    """Return the tensors of a safetensors file; raises ConfigError for any other file."""
    entries = read_header(path).items()
    return [_Stored(name, f"{each.dtype} {list(each.shape)}", each.begin, each.end) for name, each in entries]


def _sampled(readers: ThreadPoolExecutor, path: Path, tensors: list[_Stored], num_samples: int) -> Iterator[bytes]:
    """Yield a digest of each tensor of a file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        size = max(1, min(_PER_TASK, len(tensors) // _NUM_READERS // 4))
        tasks = [tensors[begin : begin + size] for begin in range(0, len(tensors), size)]
        digests = readers.map(lambda task: [_digest(descriptor, tensor, num_samples) for tensor in task], tasks)
        yield from chain.from_iterable(digests)
    finally:
        os.close(descriptor)


def _digest(descriptor: int, tensor: _Stored, num_samples: int) -> bytes:
    digest = hashlib.sha256(f"{tensor.name}\0{tensor.described}\0".encode())
    last = max(tensor.begin, tensor.end - _SAMPLE_BYTES)
    for number in range(num_samples):
        at = tensor.begin + (last - tensor.begin) * number // max(1, num_samples - 1)
        digest.update(os.pread(descriptor, min(_SAMPLE_BYTES, tensor.end - at), at))
        if last == tensor.begin:
            break  # the first sample is the whole tensor
    return digest.digest()
