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
        _check_types_once()


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
    interpreter._patch_attr = _given_semantic


def _given_semantic(owner: Any, name: str, member: Callable[..., Any], builder: object, scope: Any) -> None:
    """Make a function of the language one that is interpreted; the interpreter's own copies each call's arguments."""
    from triton.runtime.interpreter import interpreter_semantic

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter_semantic
        return member(*args, **kwargs)

    scope.set_attr(owner, name, interpreted)


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
        key = (element.name, space, *[size.value if isinstance(size, core.constexpr) else size for size in shape])
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


def _check_types_once() -> None:
    """Operands of equal types, or of equal shapes, are neither compared part by part nor converted.

    The sums that detect overflows are left out, because the interpreter computes them and then asserts nothing: its
    option `debug` is off.
    """
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import interpreter_semantic

    check, make_alike, equals = (
        TritonSemantic.binary_op_type_checking_impl,
        TritonSemantic.broadcast_impl_value,
        core.dtype.__eq__,
    )
    widened = {core.float16.name, core.bfloat16.name}  # by divisions

    def checked(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        if isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor):
            kind = lhs.dtype
            is_equal = kind.name == rhs.dtype.name and not isinstance(kind, core.pointer_type)
            if is_equal and not (div_or_mod and kind.name in widened):
                return alike(self, lhs, rhs)
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def alike(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else make_alike(self, lhs, rhs)

    def is_equal(self: Any, other: Any) -> bool:
        return self is other or equals(self, other)

    TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value = checked, alike
    core.dtype.__eq__ = is_equal
    if not interpreter_semantic.builder.options.debug:
        TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
