"""Where there is no GPU, Triton interprets its kernels; it must be told before anything imports it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


def prepare_once() -> None:
    """Triton's language is made ready to be interpreted once for each module that speaks it, and stays so.

    The interpreter does that for every call that a kernel makes, which takes it half of its time.
    """
    from triton.runtime import interpreter

    prepare: Callable[[Any], Any] = interpreter._patch_lang
    ready: set[str] = set()

    def prepared(function: Any) -> Any:
        if function.__module__ not in ready:
            prepare(function)
            ready.add(function.__module__)
        return interpreter._LangPatchScope()  # of nothing that is to be undone

    interpreter._patch_lang = prepared
