"""Thread-safe compilation and loading of Triton's kernels and launchers; imported where Triton is.

Before 3.7, Triton compiles a launcher for each signature as an extension module, always with the same module name.
Loading a launcher again, for another kernel of the signature, makes Python update whatever module has the name then.
Another thread, about to read its own launcher from the module, gets a wrong launcher.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from threading import Lock
from types import SimpleNamespace
from typing import Any

from triton import AsyncCompileMode


@contextmanager
def launchers_apart(build: Any) -> Iterator[None]:
    """Serialize loads inside the context, and copy each result; `build` is Triton's module `build`."""
    load, turn = getattr(build, "_load_module_from_path", None), threading.Lock()
    if load is None:  # a Triton without the function
        yield
        return

    def load_apart(name: str, path: str) -> SimpleNamespace:
        with turn:
            return SimpleNamespace(**vars(load(name, path)))

    build._load_module_from_path = load_apart
    try:
        yield
    finally:
        build._load_module_from_path = load


class OneOfEach(AsyncCompileMode):  # type: ignore[misc]  # Triton has no types
    """Compile mode on the threads of `executor`; simultaneous requests for a kernel share its compilation."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self._turn = Lock()

    def submit(self, key: str, compile_fn: Callable[[], object], finalize_fn: Callable[[object], object]) -> object:
        with self._turn:
            return super().submit(key, compile_fn, finalize_fn)
