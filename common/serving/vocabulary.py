"""Token ids come from elsewhere; one that the embedding has no row for would end a worker."""

from collections.abc import Sequence

import numpy as np


def stranger(token_ids: Sequence[int], vocab_size: int) -> str:
    """What is wrong with a prompt whose ids are not all of the vocabulary; empty when they are. None is negative."""
    highest = int(np.asarray(token_ids).max())
    return f"token {highest} is not among the {vocab_size} of this worker's model" if highest >= vocab_size else ""
