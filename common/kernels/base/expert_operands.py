"""Bundles of operands for experts: rules and results of the choice, order of the work that follows, and matrices."""

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 128
"""Columns, or rows, of a matrix of codes of 8 bits that share a scale where not a whole row does."""
CODES = (torch.float8_e4m3fn, torch.int8, torch.uint8)
"""Types of codes; bytes are e4m3."""
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
    """A matrix of each expert: plain; in MXFP4 if its scales are bytes; in codes of 8 bits if they are fp32."""

    data: Tensor  # [num_experts, n, k]; of MXFP4 bytes [num_experts, n, k / 2]; e4m3 may be handed over as bytes
    scales: Tensor | None = None  # of MXFP4 [num_experts, n, k / 32] uint8
    # of codes fp32 [num_experts, n or cdiv(n, GROUP), 1 or cdiv(k, GROUP)]: of rows, or of groups of columns
    bias: Tensor | None = None  # [num_experts, n]

    @property
    def num_out(self) -> int:
        return self.data.shape[1]

    @property
    def num_in(self) -> int:
        return self.data.shape[2] * (2 if self.is_mxfp4 else 1)

    @property
    def is_mxfp4(self) -> bool:
        return self.scales is not None and self.scales.dtype == torch.uint8

    @property
    def has_codes(self) -> bool:
        return self.scales is not None and not self.is_mxfp4

    @property
    def scale_rows(self) -> int:
        """Return the rows that share scales of codes; 0 without codes."""
        if self.scales is None or self.is_mxfp4:
            return 0
        return 1 if self.scales.shape[1] == self.num_out else GROUP

    @property
    def scale_groups(self) -> int:
        """Return the groups of columns that have a scale each, 1 for whole rows; 0 without codes."""
        return 0 if self.scales is None or self.is_mxfp4 else self.scales.shape[2]

    def check_codes(self, *, is_gated: bool) -> None:
        """Require codes and scales that fit; of gate and up, no rows of both may share a scale."""
        num, n, k = self.data.shape
        assert self.scales is not None and self.data.dtype in CODES, f"{self.data.dtype}: no codes"
        shapes = [(num, n, 1), *((num, rows, -(-k // GROUP)) for rows in (n, -(-n // GROUP)))]
        assert self.scales.dtype == torch.float32 and self.scales.shape in shapes, (
            f"scales {tuple(self.scales.shape)} {self.scales.dtype}: fp32, one of {shapes} needed"
        )
        assert self.scales.is_contiguous(), "scales: contiguous"
        assert not is_gated or n // 2 % self.scale_rows == 0, f"{n} rows of gate and up share scales of {GROUP} rows"
