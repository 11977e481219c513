"""Which rows of a decode batch share a prefix: their block tables begin with the same blocks. Torch-free."""

from typing import NamedTuple


class SharedPrefix(NamedTuple):
    """What a row has in common with others, as `SharedPrefixes` tells the device."""

    number: int  # the same of all that share it, and of no others
    num_tokens: int


UNSHARED = SharedPrefix(-1, 0)
