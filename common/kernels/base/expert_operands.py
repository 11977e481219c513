"""Bundles of operands for experts: rules and results of the choice, order of the work that follows, and matrices."""

from typing import NamedTuple

from torch import Tensor

MXFP4_SCALES = range(18, 145)
"""Scales of MXFP4, as bytes, that kernels compute in bfloat16; values of 0 may have smaller ones, too."""


class Routing(NamedTuple):
    """Experts of each token: the chosen from the highest score down, then the shared; -1 for padding."""

    experts: Tensor  # [num_tokens, num_slots] int32
    weights: Tensor  # [num_tokens, num_slots] fp32, 0 for padding


class Choice(NamedTuple):
    """Rules of a token's choice of experts: fields of `common.base.routing.Route`."""

    per_token: int
    score: str  # softmax or sigmoid
    renormalizes: bool
    scale: float
    logit_scale: float
    groups: int
    kept_groups: int
    group_best: int


class Groups(NamedTuple):
    """Pairs of a token and an expert, sorted by expert and divided into tiles of one expert each.

    Pairs are numbered `token * num_slots + slot`. Pairs of an expert are in this order, and padding comes last.
    """

    order: Tensor  # [num_pairs] int32, numbers of pairs
    tiles: Tensor  # [3, num_tiles] int32: expert, -1 for padding; first place in `order`, and the end; often empty


class ExpertMatrix(NamedTuple):
    """A matrix of each expert; in MXFP4 if there are scales."""

    data: Tensor  # [num_experts, n, k]; of bytes [num_experts, n, k / 2]
    scales: Tensor | None = None  # [num_experts, n, k / 32] uint8
    bias: Tensor | None = None  # [num_experts, n]

    @property
    def num_out(self) -> int:
        return self.data.shape[1]

    @property
    def num_in(self) -> int:
        return self.data.shape[2] * (1 if self.scales is None else 2)
