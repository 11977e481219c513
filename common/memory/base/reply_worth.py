"""Rule for blocks of another pool: take, or compute. The proposer and the taker share the rule."""


def copying_us(num_blocks: int, block_bytes: int, gb_per_s: float) -> float:
    """Return the duration of a copy, in microseconds; `gb_per_s` must be positive."""
    return num_blocks * block_bytes / (gb_per_s * 1e3)


def is_worth_taking(num_blocks: int, block_bytes: int, gb_per_s: float, computing_us: float, taking_us: float) -> bool:
    """Tell whether taking the blocks is faster than computing.

    Args:
        computing_us: time to compute a block.
        taking_us: fixed time of a transfer, beside the copy.
    """
    return copying_us(num_blocks, block_bytes, gb_per_s) + taking_us < num_blocks * computing_us
