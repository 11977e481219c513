"""A file of kernels compiled ahead, for workers to find where Triton looks for compiled kernels.

Triton names a kernel by a hash of its source, its arguments' kinds and constants, the GPU's capability, and the
compiler. So a kernel of a file is used only where the worker would compile the same. Beside kernels are extension
modules in C, by which Triton loads and launches kernels; Triton names them by a hash of their source. They are used
only by the Python and the platform that they were built for; elsewhere Triton builds others.

A file is a line of text, the SHA-256 of the rest, and `Contents` in msgpack.
"""

import hashlib
import json
import os
import platform
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime import build, cache

from common.base.errors import ConfigError
from common.kernels.base import gpu

MAGIC = b"baton kernels 3\n"
GROUP = "__grp__"
"""Triton's prefix of the file that lists a kernel's files."""
DIGEST_BYTES = hashlib.sha256().digest_size
MAX_BYTES = 4 << 30
Key = Annotated[str, msgspec.Meta(pattern=r"\A[A-Z2-7]{52}\Z")]


class Kernel(NamedTuple):
    """A compiled kernel: Triton's key, its function's name, metadata in JSON, and the binary."""

    key: Key
    name: Annotated[str, msgspec.Meta(pattern=r"\A\w{1,150}\Z")]
    metadata: bytes
    binary: bytes


class Extension(NamedTuple):
    """A built extension module: Triton's key, its file's name, and the file."""

    key: Key
    name: Annotated[str, msgspec.Meta(pattern=r"\A\w[\w.-]{1,150}\.so\Z")]
    content: bytes


class Contents(NamedTuple):
    """A file's kernels and extensions, and what must be the same where each is used."""

    conditions: dict[str, Any]
    kernels: list[Kernel]
    platform: dict[str, str]
    extensions: list[Extension]


def conditions(targets: Mapping[str, GPUTarget]) -> dict[str, Any]:
    """Return what must be the same here and where a file is used, by name; `targets` by compute capability."""
    return {
        "sources of the kernels": _source_hash(),
        "Triton": triton.__version__,
        "Triton's files": hashlib.sha256(cache.triton_key().encode()).hexdigest(),
        "compiler's environment": dict(sorted(get_cache_invalidating_env_vars().items())),
        "capabilities": {name: make_backend(target).hash() for name, target in targets.items()},
    }


def platform_here() -> dict[str, str]:
    """Return what an extension module must be built for to be loaded by this process, by name."""
    return {
        "Python": str(sysconfig.get_config_var("EXT_SUFFIX")),
        "platform": build.platform_key(),
        "C library": " ".join(platform.libc_ver()),
    }


def write_kernels(path: Path, directory: Path, wanted: Mapping[str, Any]) -> Contents:
    """Write all kernels and extensions in a directory of Triton's into a file, under `wanted` conditions.

    Returns what was written.
    """
    found = Contents(dict(wanted), sorted(_compiled(directory)), platform_here(), sorted(_extensions(directory)))
    rest = msgspec.msgpack.encode(found)
    with tempfile.NamedTemporaryFile(dir=path.absolute().parent, delete=False) as file:
        file.write(MAGIC + hashlib.sha256(rest).digest() + rest)
        os.fchmod(file.fileno(), 0o644)
    os.replace(file.name, path)
    return found


def read_kernels(path: Path) -> Contents:
    """Return the contents of a file; raises ConfigError for a file that is missing, cut or changed."""
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
    try:
        return msgspec.msgpack.decode(rest, type=Contents)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from None


class Unpacked(NamedTuple):
    """Numbers of what is where Triton finds it, and why extensions are not, or ""."""

    num_kernels: int
    num_extensions: int
    refused: str


def unpack(path: Path, target: GPUTarget) -> Unpacked:
    """Put all kernels of a file where Triton finds them, and the extensions, if built for this Python and platform.

    What is there already stays. Raises ConfigError for a broken file. So does a file made under other conditions than
    those of this process on a GPU of `target`; the error names each difference.
    """
    found = read_kernels(path)
    capability = f"{target.arch // 10}.{target.arch % 10}"
    if different := _differences(found.conditions, conditions({capability: target})):
        raise ConfigError(f"{path} was made for {'; '.join(different)}")
    others = [
        f"{name} {found.platform.get(name)} (here {value})"
        for name, value in platform_here().items()
        if found.platform.get(name) != value
    ]
    extensions = [] if others else found.extensions
    directory = Path(knobs.cache.dir)
    try:
        for kernel in found.kernels:
            _put(directory / kernel.key, kernel)
        for extension in extensions:
            _put_file(directory / extension.key / extension.name, extension.content)
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}") from None
    return Unpacked(len(found.kernels), len(extensions), "; ".join(others))


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


def _extensions(directory: Path) -> Iterator[Extension]:
    """Yield all built extension modules in a directory of Triton's."""
    for path in directory.glob("*/*.so"):
        yield Extension(path.parent.name, path.name, path.read_bytes())


def _put(place: Path, kernel: Kernel) -> None:
    """Write a kernel's files, and last the list of them, by which Triton finds the kernel."""
    group = place / f"{GROUP}{kernel.name}.json"
    if group.exists():
        return
    metadata, binary = place / f"{kernel.name}.json", place / f"{kernel.name}.cubin"
    listed = json.dumps({"child_paths": {path.name: str(path) for path in (metadata, binary)}}).encode()
    for path, content in ((metadata, kernel.metadata), (binary, kernel.binary), (group, listed)):
        _put_file(path, content, replace=True)


def _put_file(path: Path, content: bytes, *, replace: bool = False) -> None:
    """Write a file at once, so that no process reads a part of it; a file that is there stays unless told."""
    if path.exists() and not replace:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
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
