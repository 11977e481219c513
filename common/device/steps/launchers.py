"""Triton's launchers, loaded by several threads.

Before 3.7 Triton compiles a launcher for each signature, an extension module, and gives all of them one name. When one
is loaded again, for another kernel of that signature, Python updates whatever module has the name at that moment: a
thread that is about to take its own launcher out of it gets another kernel's.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any


@contextmanager
def launchers_apart(build: Any) -> Iterator[None]:
    """Meanwhile each load is by itself, and what it found stays as it was. `build` is Triton's module of that name."""
    load, turn = getattr(build, "_load_module_from_path", None), threading.Lock()
    if load is None:  # a Triton that loads nothing so
        yield
        return

    def load_apart(name: str, path: str) -> Any:
        with turn:
            return SimpleNamespace(**vars(load(name, path)))

    build._load_module_from_path = load_apart
    try:
        yield
    finally:
        build._load_module_from_path = load
