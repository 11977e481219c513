"""Which prompt steps gather K and V of their sequences before attention, where a kernel exists for that.

The figures come from `benchmarks.kernels` on an H200: both kernels at the same prompts.
"""

from torch import Tensor

GATHERED_ABOVE = 512
"""Tokens of a step: attention of no more than these is over before gathering would pay."""
SHORT_PROMPT = 64
"""Keys. Many prompts of so few leave most of a tile of queries empty, and are read faster where they lie."""
MAX_KEYS = 65536
"""Of one step: what gathering may take of memory."""


def is_gathered(q: Tensor, num_seqs: int, num_keys: int) -> bool:
    """Whether attention of queries `[num_tokens, num_heads, head_dim]` gathers; `num_keys` as in `ForwardBatch`."""
    num_tokens, _, head_dim = q.shape
    has_work = num_tokens > GATHERED_ABOVE and num_seqs * SHORT_PROMPT < num_keys <= MAX_KEYS
    return has_work and head_dim in (64, 128) and q.element_size() == 2
