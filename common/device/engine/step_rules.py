"""Rules about sizes of steps, without torch: workers follow the rules, and `baton plan` computes with them."""

from typing import NamedTuple, Protocol

STEP_PART, CHUNK_PART = 6, 16
"""Divisors of memory beside the weights: largest prefill step, largest decode-worker chunk."""
FEWEST_TOKENS = 512
"""Fewer tokens leave a GPU idle."""
CUDA_CONTEXT_BYTES = 1 << 30
"""Reserve of a worker for the CUDA context, cuBLAS workspaces and loaded kernels."""
TYPICAL_TOKENS = 4096
"""Tokens of a typical sequence; its blocks in each group give the ratio of pool sizes."""
MIN_SPARED_BYTES = 6 << 30
"""Least spared bytes for a sharing decode step; fewer come from the L2 cache as fast."""


class StepSize(NamedTuple):
    """Size of a worker's largest step."""

    num_tokens: int
    num_logit_rows: int


class Activations(Protocol):
    """A model's need of memory."""

    def activation_bytes(self, num_tokens: int, num_logit_rows: int) -> int:
        """Return an upper bound of the bytes held at once by a step."""
        ...


def fitting_tokens(num_tokens: int, model: Activations, num_bytes: int) -> int:
    """Halve `num_tokens` until a step takes at most `num_bytes`, but not below FEWEST_TOKENS."""
    while num_tokens > FEWEST_TOKENS and model.activation_bytes(num_tokens, 0) > num_bytes:
        num_tokens //= 2
    return num_tokens


def batch_buckets(max_rows: int) -> list[int]:
    """Return row counts to capture graphs for: 1, 2, 4, then multiples of 8, 16 and 32, up to `max_rows`."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 1025, 32)]
    return [*(rows for rows in steps if rows < max_rows), max_rows]
