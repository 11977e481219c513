"""Stops: places within a text behind which later texts can resume, because windows and states are kept there.

A text has a stop at each **doubling**: behind 1,024 tokens, 2,048, 4,096 and so on. So stops are few in long texts, and
a text that parts from another computes at most half of the common part again. A prompt has further stops (see
`checkpoints`).
"""

FIRST_TOKENS = 1024
"""Tokens before the first stop.

A snapshot of Qwen3.5-4B has 51.5 MB, as much as the KV of 1,572 tokens.
"""


def last_doubling(num_places: int, block_size: int) -> int:
    """Return the last stop within the first `num_places` places; 0 for none."""
    if (num_firsts := num_places * block_size // FIRST_TOKENS) < 1:
        return 0
    return -(-(FIRST_TOKENS << num_firsts.bit_length() - 1) // block_size)


def is_doubling(num_places: int, block_size: int) -> bool:
    """Tell whether there is a stop behind `num_places` places."""
    return num_places > 0 and last_doubling(num_places, block_size) == num_places
