"""Rule for blocks in host memory: copy back, or compute again. Client and memory server share the rule."""

MIN_TOKENS = 128
"""Fewer tokens are not worth copying."""
OVERHEAD_US = 1000.0
"""Overhead beside the copies; a restore must save more."""


def is_worth_copying(num_blocks: int, block_size: int, computing_us: float, copy_us: float) -> bool:
    """Tell whether copying blocks back saves time over computing; times are per block."""
    return num_blocks * block_size >= MIN_TOKENS and num_blocks * (computing_us - copy_us) > OVERHEAD_US


def restoring_us(num_blocks: int, copy_us: float) -> float:
    """Return the wait for a restore, in microseconds."""
    return OVERHEAD_US + num_blocks * copy_us
