"""Rules about sizes of steps, without torch: workers follow the rules, and `baton plan` computes with them."""

from typing import NamedTuple, Protocol

STEP_PART, CHUNK_PART = 6, 16
"""Divisors of memory beside the weights: largest prefill step, largest decode-worker chunk."""
FEWEST_TOKENS = 512
"""Fewer tokens leave a GPU idle."""
CUDA_CONTEXT_BYTES = 1 << 30
"""Reserve of a worker for the CUDA context, cuBLAS workspaces and loaded kernels."""
MIN_SPARED_BYTES = 6 << 30
"""Least spared bytes for a sharing decode step; fewer come from the L2 cache as fast."""


class StepSize(NamedTuple):
    """Size of a worker's largest step."""

    num_tokens: int
    num_logit_rows: int


class ModelSizes(Protocol):
    """Sizes of a decoder, in elements."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_q_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def step_bytes(model: ModelSizes, step: StepSize) -> int:
    """Return an upper bound of the bytes held at once by a step, doubled for the allocator's rounding.

    Each logit row counts four times, for copies of the logits, token counts and the sampler's intermediate results.
    """
    rows = (model.num_q_heads * 2 + model.num_kv_heads * 2) * model.head_dim
    width = rows + 3 * model.intermediate_size + 4 * model.hidden_size
    return 2 * (step.num_tokens * width * 4 + step.num_logit_rows * model.vocab_size * 4 * 4)


def fitting_tokens(num_tokens: int, model: ModelSizes, num_bytes: int) -> int:
    """Halve `num_tokens` until a step takes at most `num_bytes`, but not below FEWEST_TOKENS."""
    while num_tokens > FEWEST_TOKENS and step_bytes(model, StepSize(num_tokens, 0)) > num_bytes:
        num_tokens //= 2
    return num_tokens


def batch_buckets(max_rows: int) -> list[int]:
    """Return row counts to capture graphs for: 1, 2, 4, then multiples of 8, 16 and 32, up to `max_rows`."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 1025, 32)]
    return [*(rows for rows in steps if rows < max_rows), max_rows]
