"""Which kernel computes attention of a prompt step: of few queries, on gathered K and V, or neither.

The figures come from `benchmarks.kernels` on an H200: kernels at the same prompts.
"""

from torch import Tensor

from common.kernels.attention.query_parts import tokens_of_tile

FEW_TOKENS = 128
"""Of a step: no more have their contexts cut, so that long ones fill the GPU. More fill it by themselves."""
GATHERED_ABOVE = 512
"""Tokens of a step: attention of no more than these is over before gathering would pay."""
SHORT_PROMPT = 64
"""Keys. Many prompts of so few leave most of a tile of queries empty, and are read faster where they lie."""
MAX_KEYS = 65536
"""Of one step: what gathering may take of memory."""


def has_few_queries(q: Tensor, num_kv_heads: int) -> bool:
    """Whether queries `[num_tokens, num_heads, head_dim]` are so few that contexts are cut."""
    num_tokens, num_q_heads, _ = q.shape
    return num_tokens <= FEW_TOKENS and tokens_of_tile(q.dtype, num_q_heads, num_kv_heads) > 0


def is_gathered(q: Tensor, num_seqs: int, num_keys: int) -> bool:
    """Whether attention of queries `[num_tokens, num_heads, head_dim]` gathers; `num_keys` as in `ForwardBatch`."""
    num_tokens, _, head_dim = q.shape
    has_work = num_tokens > GATHERED_ABOVE and num_seqs * SHORT_PROMPT < num_keys <= MAX_KEYS
    return has_work and head_dim in (64, 128) and q.element_size() == 2
