"""Compilation of kernels wanted by several threads: each kernel is compiled, or loaded, once."""

from concurrent.futures import Executor
from threading import Lock
from typing import Any

from triton import AsyncCompileMode


class OneOfEach(AsyncCompileMode):  # type: ignore[misc]  # Triton has no types
    """Compile mode on the threads of `executor`; simultaneous requests for a kernel share its compilation."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self._turn = Lock()

    def submit(self, key: str, compile_fn: Any, finalize_fn: Any) -> Any:
        with self._turn:
            return super().submit(key, compile_fn, finalize_fn)
