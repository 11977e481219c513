"""Preparation for loading kernels, done on import: half a second, so a fork server imports it for all workers.

Import it before others, because a thread reads Triton's files meanwhile.
"""

import sys
from collections.abc import Iterator

from triton.runtime.jit import JITCallable

from common.device.steps.jit_source import quick_blocks
from common.device.steps.triton_hash import begin_triton_key

_keep_triton_key = begin_triton_key()  # in a thread, because a first start reads hundreds of megabytes

with quick_blocks():
    import common.device.engine.lean_torch
    import common.kernels.sampling.adjust_logits
    import common.kernels.sampling.logprobs
    import common.kernels.sampling.sampling
    import common.ops.cuda_ops  # noqa: F401 - these four are imported for their kernels


def functions() -> Iterator[JITCallable]:
    """Yield the functions of all imported kernels."""
    for name, module in list(sys.modules.items()):
        if name.startswith("common.kernels."):
            yield from (value for value in vars(module).values() if isinstance(value, JITCallable))


def hash_helpers_first(function: JITCallable) -> None:
    """Make Triton hash the callees of a function before the function, so a kernel's key on disk is stable.

    Otherwise the hash would depend on the order of hashing, left to chance by threads. A hash includes a helper's
    constants only if the helper was hashed before.
    """
    if function.hash is None:
        for name in function.fn.__code__.co_names:
            helper = function.__globals__.get(name)
            if isinstance(helper, JITCallable) and helper is not function:
                hash_helpers_first(helper)
        _ = function.cache_key


_keep_triton_key()  # before threads ask for the hash, which each would compute
for _function in functions():
    hash_helpers_first(_function)
