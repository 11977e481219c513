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
        from tests.support import interpreted_noise, interpreted_operands

        _prepare_once()
        _remember_types()
        _hold_lightly()
        interpreted_operands.install()
        interpreted_noise.install()


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
    """Make a function of the language one that is interpreted; the interpreter's own copies each call's arguments.

    The function is taken out of its check that somebody gives it a semantic.
    """
    from triton.language import core
    from triton.runtime.interpreter import interpreter_semantic

    function = getattr(member, "__wrapped__", member) if core.is_builtin(member) else member

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter_semantic
        return function(*args, **kwargs)

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


def _hold_lightly() -> None:
    """Check once, by a table, that an operation's numbers are no wider than its type."""
    from triton.runtime import interpreter

    most = {f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)} | {"int1": 1}
    most |= {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}

    def fits(data: Any, dtype: Any) -> bool:
        limit = most.get(dtype.name)
        is_narrow: bool = data.itemsize <= limit if limit else validate(data, dtype)
        return is_narrow

    def hold(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if not fits(data, dtype):
            raise ValueError(f"numbers of {data.itemsize} bytes are wider than {dtype}")

    def binary(self: Any, lhs: Any, rhs: Any, operation: Any) -> Any:
        dtype = lhs.dtype.scalar
        output = operation(lhs.data, rhs.data)
        return interpreter.TensorHandle(output if fits(output, dtype) else output.astype(numpy_type(dtype)), dtype)

    validate, numpy_type = interpreter._validate_np_data_size, interpreter._get_np_dtype
    interpreter._validate_np_data_size, interpreter.TensorHandle.__init__ = fits, hold
    interpreter.InterpreterBuilder.binary_op = binary
