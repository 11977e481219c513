"""Choice of the attention kernel of a prompt step: for few queries, on gathered K and V, or neither.

The figures come from `benchmarks.kernels` on an H200, with equal prompts for all kernels.
"""

from torch import Tensor

from common.kernels.attention.query_parts import tokens_of_tile

FEW_TOKENS = 128
"""Tokens of a step, at most, for cut contexts; more tokens fill the GPU without cuts."""
GATHERED_ABOVE = 512
"""Tokens of a step; attention of no more ends before gathering would pay."""
SHORT_PROMPT = 64
"""Keys; prompts this short leave tiles mostly empty and are read faster in place."""
GATHERED_DIMS = (64, 128, 256)
"""Sizes of heads for which gathered keys are attended."""
MAX_KEYS = 65536
"""Keys of a step, at most, because gathering takes memory."""


def has_few_queries(q: Tensor, num_kv_heads: int) -> bool:
    """Tell whether queries `[num_tokens, num_heads, head_dim]` are so few that contexts are cut."""
    num_tokens, num_q_heads, _ = q.shape
    return num_tokens <= FEW_TOKENS and tokens_of_tile(q.dtype, num_q_heads, num_kv_heads) > 0


def is_gathered(q: Tensor, num_seqs: int, num_keys: int) -> bool:
    """Tell whether attention of `q [num_tokens, num_heads, head_dim]` gathers; `num_keys` is as in `ForwardBatch`."""
    num_tokens, _, head_dim = q.shape
    has_work = num_tokens > GATHERED_ABOVE and num_seqs * SHORT_PROMPT < num_keys <= MAX_KEYS
    return has_work and head_dim in GATHERED_DIMS and q.element_size() == 2
