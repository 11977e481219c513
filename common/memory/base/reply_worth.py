"""Whether blocks of another pool are better taken from there than computed: who names it and who takes reckon alike."""


def copying_us(num_blocks: int, block_bytes: int, gb_per_s: float) -> float:
    """How long so many are on their way, which carries more than nothing."""
    return num_blocks * block_bytes / (gb_per_s * 1e3)


def is_worth_taking(num_blocks: int, block_bytes: int, gb_per_s: float, computing_us: float, taking_us: float) -> bool:
    """Whether so many are here sooner that way.

    Args:
        computing_us: what one takes to compute.
        taking_us: what it takes to have any come, beside the copy.
    """
    return copying_us(num_blocks, block_bytes, gb_per_s) + taking_us < num_blocks * computing_us
