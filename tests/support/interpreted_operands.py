"""Operands of Triton's interpreted operations, checked and converted once for each type instead of each time.

Import it where Triton interprets (see `interpreter`); `install` replaces the checks of the language.
"""

from types import NoneType
from typing import Any

from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import TensorHandle, interpreter_semantic

WIDENED = {core.float16.name, core.bfloat16.name}
"""By divisions."""
PLAIN = {core.tensor, core.dtype, int, float, bool, str, NoneType}
"""Types of what is no constexpr, and holds none."""

_check = TritonSemantic.binary_op_type_checking_impl
_make_alike = TritonSemantic.broadcast_impl_value
_equals = core.dtype.__eq__
_unwrap = core._unwrap_if_constexpr
_numbers: dict[Any, TensorHandle | None] = {}
"""Numbers as scalars of a tensor's type, by both and the operation's flags; None where the tensor is converted."""


def install() -> None:
    """Operands of equal types, or of equal shapes, are neither compared part by part nor converted.

    A number beside a tensor is checked and converted once for each type. A scalar beside a block is not copied for each
    element of the block, because numpy's operations take both; the result has all elements. The sums that detect
    overflows are left out, because the interpreter computes them and then asserts nothing: its option `debug` is off.
    """
    TritonSemantic.binary_op_type_checking_impl = _checked
    TritonSemantic.broadcast_impl_value = _of_one_shape
    core.dtype.__eq__, core._unwrap_if_constexpr = _is_equal, _value_of
    if not interpreter_semantic.builder.options.debug:
        TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None


def _checked(
    self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True, div_or_mod: bool = False,
) -> Any:  # fmt: skip
    flags = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
    if isinstance(lhs, core.tensor):
        if isinstance(rhs, core.tensor):
            return _alike(self, lhs, rhs) if _match(lhs.dtype, rhs.dtype, flags) else _check(self, lhs, rhs, *flags)
        if number := _scalar(self, lhs, rhs, flags, is_left=False):
            return lhs, _held(number, lhs.type)
    elif isinstance(rhs, core.tensor) and (number := _scalar(self, rhs, lhs, flags, is_left=True)):
        return _held(number, rhs.type), rhs
    return _check(self, lhs, rhs, *flags)


def _match(lhs: Any, rhs: Any, flags: tuple[bool, ...]) -> bool:
    """Tell whether operands of these types are taken as they are."""
    if isinstance(lhs, core.pointer_type):
        return flags[0] and bool(rhs.is_int())
    return lhs.name == rhs.name and not (flags[3] and lhs.name in WIDENED)


def _scalar(self: Any, tensor: Any, number: Any, flags: tuple[bool, ...], *, is_left: bool) -> TensorHandle | None:
    """Return the number as a scalar of the tensor's type; None where the tensor is converted, or all is checked."""
    kind = tensor.dtype
    if type(number) not in (int, float, bool) or number != number or isinstance(kind, core.pointer_type):
        return None
    key = (kind.name, type(number), number, flags, is_left)
    if key not in _numbers:
        one = core.tensor(TensorHandle(tensor.handle.data.ravel()[:1], kind), kind)
        pair = _check(self, number, one, *flags) if is_left else _check(self, one, number, *flags)
        of_number, of_tensor = pair if is_left else pair[::-1]
        _numbers[key] = of_number.handle if of_tensor is one else None
    return _numbers[key]


def _held(handle: TensorHandle, type: Any) -> Any:
    """Make an operand of a scalar's data; its handle is its own, because some operations change those of operands."""
    return core.tensor(TensorHandle(handle.data, handle.dtype), type)


def _alike(self: Any, lhs: Any, rhs: Any) -> Any:
    if lhs.shape is rhs.shape:
        return lhs, rhs
    if not rhs.type.is_block():
        return lhs, _held(rhs.handle, lhs.type.with_element_ty(rhs.dtype))
    if not lhs.type.is_block():
        return _held(lhs.handle, rhs.type.with_element_ty(lhs.dtype)), rhs
    return _make_alike(self, lhs, rhs)


def _of_one_shape(self: Any, lhs: Any, rhs: Any) -> Any:
    return (lhs, rhs) if lhs.shape is rhs.shape else _make_alike(self, lhs, rhs)


def _is_equal(self: Any, other: Any) -> bool:
    return self is other or _equals(self, other)


def _value_of(operand: Any) -> Any:
    return operand if type(operand) in PLAIN else _unwrap(operand)
