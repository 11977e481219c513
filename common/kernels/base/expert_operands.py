"""Choice of experts, as a bundle of tensors."""

from typing import NamedTuple

from torch import Tensor


class Routing(NamedTuple):
    """Experts of each token: the chosen from the highest score down, then the shared; -1 for padding."""

    experts: Tensor  # [num_tokens, num_slots] int32
    weights: Tensor  # [num_tokens, num_slots] fp32, 0 for padding
