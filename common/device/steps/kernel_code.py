"""What loading kernels needs, ready once it is imported. It takes a second: import it early, in a thread of its own."""

import sys
from collections.abc import Iterator

from triton.runtime.cache import triton_key
from triton.runtime.jit import JITCallable

import common.kernels.sampling.adjust_logits
import common.kernels.sampling.logprobs
import common.kernels.sampling.sampling
import common.ops.cuda_ops  # noqa: F401 - all four are here to be imported


def functions() -> Iterator[JITCallable]:
    """Those of all kernels that are imported."""
    for name, module in list(sys.modules.items()):
        if name.startswith("common.kernels."):
            yield from (value for value in vars(module).values() if isinstance(value, JITCallable))


def hash_helpers_first(function: JITCallable) -> None:
    """Have Triton hash a function, by which its kernel is found on disk, and what it calls before it.

    Otherwise the hash would depend on what was hashed before, which threads leave to chance: constants of a helper are
    part of it if the helper has been hashed by then.
    """
    if function.hash is None:
        for name in function.fn.__code__.co_names:
            helper = function.__globals__.get(name)
            if isinstance(helper, JITCallable) and helper is not function:
                hash_helpers_first(helper)
        _ = function.cache_key


triton_key()  # a hash of all of Triton, 460 MB, kept once it is there; threads that want it at once would each make it
for _function in functions():
    hash_helpers_first(_function)
