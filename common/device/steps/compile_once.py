"""Kernels that several threads want: each is compiled, or loaded, once."""

from concurrent.futures import Executor
from threading import Lock
from typing import Any

from triton import AsyncCompileMode


class OneOfEach(AsyncCompileMode):  # type: ignore[misc]  # Triton has no types
    """By the threads of `executor`; those who ask for one at the same moment get the same."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self._turn = Lock()

    def submit(self, key: str, compile_fn: Any, finalize_fn: Any) -> Any:
        with self._turn:
            return super().submit(key, compile_fn, finalize_fn)
