"""Philox of Triton's interpreter, which makes noise: rounds on numpy's arrays instead of a hundred operations."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
from triton.language import core, random
from triton.runtime.interpreter import TensorHandle

FACTORS, STEPS, WORD = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), np.uint64((1 << 32) - 1)


def install() -> None:
    """Replace the rounds for words of 32 bits; `__wrapped__` is the function of the language."""
    random.philox_impl = _with_rounds_of_numpy(random.philox_impl)


def _with_rounds_of_numpy(interpreted: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(interpreted, assigned=(), updated=())
    def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any, n_rounds: Any = random.N_ROUNDS_DEFAULT) -> Any:
        operands = (c0, c1, c2, c3, k0, k1)
        if any(operand.dtype != core.uint32 for operand in operands):
            return interpreted(*operands, n_rounds)
        num_rounds = int(getattr(n_rounds, "value", n_rounds))
        words = np.broadcast_arrays(*_rounds([operand.handle.data for operand in operands], num_rounds))
        kind = next((operand.type for operand in operands if operand.type.is_block()), c0.type)
        handles = (TensorHandle(np.array(each, np.uint32), core.uint32) for each in words)
        return core.tuple([core.tensor(handle, kind) for handle in handles])

    return philox


def _rounds(operands: list[np.ndarray], num_rounds: int) -> list[np.ndarray]:
    """Return the four words after the rounds, of words and keys: [num] uint64 below 2^32."""
    c0, c1, c2, c3, k0, k1 = (operand.astype(np.uint64) for operand in operands)
    (factor_a, factor_b), (step_a, step_b) = map(np.uint64, FACTORS), map(np.uint64, STEPS)
    for _ in range(num_rounds):
        a, b = c0 * factor_a, c2 * factor_b
        c0, c1, c2, c3 = (b >> np.uint64(32)) ^ c1 ^ k0, b & WORD, (a >> np.uint64(32)) ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + step_a) & WORD, (k1 + step_b) & WORD
    return [c0, c1, c2, c3]
