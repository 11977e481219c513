"""Rules for copies of blocks, from host memory or from another pool: copy, or compute again.

Both sides of a decision share the rules: the router predicts, and a memory server or worker decides.
"""

MIN_TOKENS = 128
"""Fewer tokens are not worth a copy from host memory."""
OVERHEAD_US = 1000.0
"""Overhead of a restore beside its copies; a restore must save more."""


def is_restore_faster(num_blocks: int, block_size: int, computing_us: float, copy_us: float) -> bool:
    """Tell whether copies from host memory are faster than computing; times are per block."""
    return num_blocks * block_size >= MIN_TOKENS and num_blocks * (computing_us - copy_us) > OVERHEAD_US


def restore_us(num_blocks: int, copy_us: float) -> float:
    """Return the wait for a restore, in microseconds."""
    return OVERHEAD_US + num_blocks * copy_us


def pull_us(num_bytes: int, gb_per_s: float) -> float:
    """Return the duration of a copy from another pool, in microseconds; `gb_per_s` must be positive."""
    return num_bytes / (gb_per_s * 1e3)


def is_pull_faster(num_bytes: int, gb_per_s: float, computing_us: float, overhead_us: float) -> bool:
    """Tell whether a copy from another pool is faster than computing.

    Args:
        computing_us: time to compute what is copied.
        overhead_us: time of a transfer beside the copy.
    """
    return pull_us(num_bytes, gb_per_s) + overhead_us < computing_us
