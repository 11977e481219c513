"""Whether blocks in host memory are better copied back than computed: who asks and who is asked reckon alike."""

MIN_TOKENS = 128
"""That are copied back at once: of fewer not much can be saved."""
OVERHEAD_US = 1000.0
"""Beside the copies: what is saved must be more."""


def is_worth_copying(num_blocks: int, block_size: int, computing_us: float, copy_us: float) -> bool:
    """Whether to copy so many blocks takes less than to compute them, as one takes so long either way."""
    return num_blocks * block_size >= MIN_TOKENS and num_blocks * (computing_us - copy_us) > OVERHEAD_US


def restoring_us(num_blocks: int, copy_us: float) -> float:
    """How long who asked for them waits."""
    return OVERHEAD_US + num_blocks * copy_us
