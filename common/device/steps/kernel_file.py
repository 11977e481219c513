"""A file of kernels compiled ahead, for workers to find where Triton looks for compiled kernels.

Triton names a kernel by a hash of its source, its arguments' kinds and constants, the GPU's capability, and the
compiler. So a kernel of a file is used only where the worker would compile the same.

A file is a line of text, the SHA-256 of the rest, a header in JSON behind its length, and all kernels. The header has
the conditions, and each kernel's key, name, and bytes of metadata and of binary.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime import cache

from common.base.errors import ConfigError
from common.kernels.base import gpu

MAGIC = b"baton kernels 1\n"
GROUP = "__grp__"
"""Triton's prefix of the file that lists a kernel's files."""
DIGEST_BYTES, LENGTH_BYTES = hashlib.sha256().digest_size, 8
MAX_BYTES = 4 << 30
KEY, NAME = re.compile(r"[A-Z2-7]{52}"), re.compile(r"\w{1,150}")


class Kernel(NamedTuple):
    """A compiled kernel: Triton's key, its function's name, metadata in JSON, and the binary."""

    key: str
    name: str
    metadata: bytes
    binary: bytes


def conditions(targets: Mapping[str, GPUTarget]) -> dict[str, Any]:
    """Return what must be the same here and where a file is used, by name; `targets` by compute capability."""
    return {
        "sources of the kernels": _source_hash(),
        "Triton": triton.__version__,
        "Triton's files": hashlib.sha256(cache.triton_key().encode()).hexdigest(),
        "compiler's environment": dict(sorted(get_cache_invalidating_env_vars().items())),
        "capabilities": {name: make_backend(target).hash() for name, target in targets.items()},
    }


def write_kernels(path: Path, directory: Path, wanted: Mapping[str, Any]) -> list[Kernel]:
    """Write all kernels in a directory of Triton's into a file, under `wanted` conditions; return the kernels."""
    kernels = sorted(_compiled(directory))
    header = {
        "conditions": wanted,
        "kernels": [[each.key, each.name, len(each.metadata), len(each.binary)] for each in kernels],
    }
    text = json.dumps(header).encode()
    rest = b"".join(
        [len(text).to_bytes(LENGTH_BYTES), text, *(piece for each in kernels for piece in (each.metadata, each.binary))]
    )
    with tempfile.NamedTemporaryFile(dir=path.absolute().parent, delete=False) as file:
        file.write(MAGIC + hashlib.sha256(rest).digest() + rest)
        os.fchmod(file.fileno(), 0o644)
    os.replace(file.name, path)
    return kernels


def read_kernels(path: Path) -> tuple[dict[str, Any], list[Kernel]]:
    """Return conditions and kernels of a file; raises ConfigError for a file that is missing, cut or changed."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    begin = len(MAGIC) + DIGEST_BYTES
    if not content.startswith(MAGIC):
        raise ConfigError(f"{path} is no file of kernels of this version")
    rest = memoryview(content)[begin:]
    if hashlib.sha256(rest).digest() != content[len(MAGIC) : begin]:
        raise ConfigError(f"{path} is cut or was changed: its bytes have another sum")
    end = LENGTH_BYTES + int.from_bytes(rest[:LENGTH_BYTES])
    header, kernels = json.loads(bytes(rest[LENGTH_BYTES:end])), []
    for key, name, num_metadata, num_binary in header["kernels"]:
        middle, last = end + num_metadata, end + num_metadata + num_binary
        if not KEY.fullmatch(key) or not NAME.fullmatch(name):
            raise ConfigError(f"{path} has a kernel of the name {key}/{name}")
        kernels.append(Kernel(key, name, bytes(rest[end:middle]), bytes(rest[middle:last])))
        end = last
    return header["conditions"], kernels


def unpack(path: Path, target: GPUTarget) -> int:
    """Put all kernels of a file where Triton finds them, and return their number.

    Kernels already there stay. Raises ConfigError for a broken file. So does a file made under other conditions than
    those of this process on a GPU of `target`; the error names each difference.
    """
    made, kernels = read_kernels(path)
    capability = f"{target.arch // 10}.{target.arch % 10}"
    if different := _differences(made, conditions({capability: target})):
        raise ConfigError(f"{path} was made for {'; '.join(different)}")
    directory = Path(knobs.cache.dir)
    try:
        for kernel in kernels:
            _put(directory / kernel.key, kernel)
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}") from None
    return len(kernels)


def _differences(made: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return each difference of conditions, as `Triton 3.6.0 (here 3.7.1)`."""
    different = []
    for name, value in here.items():
        other: Any = made.get(name)
        if name == "capabilities":
            [(capability, compiler)] = value.items()
            if capability not in other:
                different.append(f"capability {', '.join(other)} (here {capability})")
            elif other[capability] != compiler:
                different.append("another ptxas")
        elif other != value:
            is_readable = name in ("Triton", "compiler's environment")
            different.append(f"{name} {other} (here {value})" if is_readable else f"other {name}")
    return different


def _compiled(directory: Path) -> Iterator[Kernel]:
    """Yield all whole kernels in a directory of Triton's."""
    for group in directory.glob(f"*/{GROUP}*.json"):
        name = group.name.removeprefix(GROUP).removesuffix(".json")
        metadata, binary = (group.with_name(f"{name}.{kind}").read_bytes() for kind in ("json", "cubin"))
        yield Kernel(group.parent.name, name, metadata, binary)


def _put(place: Path, kernel: Kernel) -> None:
    """Write a kernel's files, each at once, and last the list of them, by which Triton finds the kernel."""
    group = place / f"{GROUP}{kernel.name}.json"
    if group.exists():
        return
    place.mkdir(parents=True, exist_ok=True)
    metadata, binary = place / f"{kernel.name}.json", place / f"{kernel.name}.cubin"
    listed = json.dumps({"child_paths": {path.name: str(path) for path in (metadata, binary)}}).encode()
    for path, content in ((metadata, kernel.metadata), (binary, kernel.binary), (group, listed)):
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        beside.write_bytes(content)
        os.replace(beside, path)


def _source_hash() -> str:
    """Return a hash of all source files of kernels."""
    root, total = Path(gpu.__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        total.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return total.hexdigest()


class Found:
    """Names of the kernels that were found on disk, and that were compiled."""

    def __init__(self) -> None:
        self.on_disk: list[str] = []
        self.compiled: list[str] = []

    def note(self, *, src: Any, cache_hit: bool, **_: object) -> None:
        """Take a kernel, as Triton's listener does."""
        (self.on_disk if cache_hit else self.compiled).append(src.name)


@contextmanager
def counted() -> Iterator[Found]:
    """Provide the kernels found and compiled inside the context, by any thread."""
    found, before = Found(), knobs.compilation.listener
    knobs.compilation.listener = found.note
    try:
        yield found
    finally:
        knobs.compilation.listener = before
