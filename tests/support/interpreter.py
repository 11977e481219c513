"""Where there is no GPU, Triton interprets its kernels; it must be told before anything imports it."""

import math
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


@cache
def hasten() -> None:
    """Make the interpreter faster, once in a process; does nothing where kernels are compiled."""
    import triton

    if triton.knobs.runtime.interpret:
        _prepare_once()
        _remember_types()


def _prepare_once() -> None:
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


def _remember_types() -> None:
    """Types and shapes of blocks are made once for each that there is, and not for every result of an operation.

    The interpreter makes some for each operation, which takes it longer than the arithmetic of small blocks.
    """
    from triton.language import core
    from triton.runtime import interpreter

    make_block, find_numpy_type = core.block_type.__init__, interpreter._get_np_dtype
    blocks: dict[Any, tuple[Any, ...]] = {}
    numpy_types: dict[str, Any] = {}

    def block_of(self: Any, element: Any, shape: Any) -> None:
        space = element.address_space if isinstance(element, core.pointer_type) else None
        key = (element.name, space, *(core._unwrap_if_constexpr(size) for size in shape))
        if key not in blocks:
            make_block(self, element, shape)
            blocks[key] = (self.element_ty, self.shape, self.numel, self.name)
        self.element_ty, self.shape, self.numel, self.name = blocks[key]

    @cache
    def sizes_of(*shape: int) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    def tensor_of(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = sizes_of(*(type.shape.values if type.is_block() else ()))

    def numpy_type(dtype: Any) -> Any:
        if dtype.name not in numpy_types:
            numpy_types[dtype.name] = find_numpy_type(dtype)
        return numpy_types[dtype.name]

    core.block_type.__init__, core.tensor.__init__ = block_of, tensor_of
    interpreter._get_np_dtype = numpy_type
