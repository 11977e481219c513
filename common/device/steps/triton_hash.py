"""Triton's hash of itself, over hundreds of megabytes, kept on disk for as long as its files keep size and time."""

import json
import logging
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import triton
from triton import knobs
from triton.runtime import cache

logger = logging.getLogger(__name__)

FILE = "baton-triton-key.json"
"""Name in the directory of compiled kernels."""


def begin_triton_key() -> Callable[[], str]:
    """Begin to find Triton's hash of itself; the returned function waits for it, and returns it.

    From then on Triton uses it without reading its own files again. The hash is read from disk, or computed by a thread
    and written there. A file that cannot be read or written costs time only.
    """
    files, kept = _files(Path(triton.__file__).parent), Path(knobs.cache.dir) / FILE
    key = _read(kept, files)
    if key is not None:
        return partial(_use, key)
    thread = ThreadPoolExecutor(1)
    computing = thread.submit(cache.triton_key)

    def keep() -> str:
        key = computing.result()
        thread.shutdown()
        _write(kept, {"files": files, "key": key})
        return _use(key)

    return keep


def _use(key: str) -> str:
    cache.triton_key = lambda: key
    return key


def _files(package: Path) -> list[list[object]]:
    """Return path, bytes and time of change, in ns, of all files that Triton hashes."""
    parts = [package / part for part in ("compiler", "backends", "language")]
    sources = [path for part in parts for path in part.rglob("*.py")]
    hashed = sorted([*sources, package / "runtime" / "cache.py", *(package / "_C").glob("libtriton.*")])
    return [[str(path), (about := path.stat()).st_size, about.st_mtime_ns] for path in hashed]


def _read(kept: Path, files: list[list[object]]) -> str | None:
    """Return the key kept for exactly these files."""
    with suppress(OSError, ValueError):
        content = json.loads(kept.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.get("files") == files:
            key = content.get("key")
            if isinstance(key, str) and key.startswith(triton.__version__):
                return key
    return None


def _write(kept: Path, content: dict[str, object]) -> None:
    """Replace the file at once, so that no process reads a part of it."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=kept.parent, delete=False) as file:
            json.dump(content, file)
        os.replace(file.name, kept)
    except OSError as error:
        logger.info("Triton's hash of itself is not kept: %s", error)
