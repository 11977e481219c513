"""Bundles of operands for experts: rules and results of the choice, order of the work that follows, and matrices."""

from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 128
"""Columns, or rows, of a matrix of codes of 8 bits that share a scale where not a whole row does; a block of INT4."""
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


class Form(StrEnum):
    """Form of experts' matrices in memory: what a kernel reads."""

    PLAIN = "plain"
    MXFP4 = "mxfp4"  # scales are bytes
    BYTES = "bytes"  # codes of 8 bits
    INT4 = "int4"  # codes of 4 bits in groups of columns


class ExpertMatrix(NamedTuple):
    """A matrix of each expert, in one of the forms. Of 4 bits, bytes hold two elements or codes each.

    Codes of INT4 lie in quarters of BLOCK columns, as `common.ops.base.quarters` packs them. An element is
    `scale * code + offset`, and without offsets `scale * (code - 8)`.
    """

    data: Tensor  # [num_experts, n, k], or bytes [num_experts, n, k / 2]; e4m3 may be handed over as bytes
    scales: Tensor | None = None  # of MXFP4 [num_experts, n, k / 32] uint8; of INT4 [num_experts, n, groups], a float
    # of codes fp32 [num_experts, n or cdiv(n, GROUP), 1 or cdiv(k, GROUP)]: of rows, or of groups of columns
    bias: Tensor | None = None  # [num_experts, n]
    offsets: Tensor | None = None  # as the scales, of INT4
    is_int4: bool = False  # tells INT4 from codes of 8 bits that are bytes, too

    @property
    def form(self) -> Form:
        if self.scales is None:
            return Form.PLAIN
        if self.scales.dtype == torch.uint8:
            return Form.MXFP4
        return Form.INT4 if self.is_int4 else Form.BYTES

    @property
    def num_out(self) -> int:
        return self.data.shape[1]

    @property
    def num_in(self) -> int:
        return self.data.shape[2] * (2 if self.form in PACKED else 1)

    @property
    def scale_rows(self) -> int:
        """Return the rows that share scales of codes; 0 without codes."""
        if self.scales is None or self.form is Form.MXFP4:
            return 0
        return 1 if self.scales.shape[1] == self.num_out else GROUP

    @property
    def scale_groups(self) -> int:
        """Return the groups of columns that have a scale each, 1 for whole rows; 0 without codes."""
        return 0 if self.scales is None or self.form is Form.MXFP4 else self.scales.shape[2]

    def check(self, dtype: torch.dtype, *, is_gated: bool) -> None:
        """Require contiguous operands of a form that fit each other, and plain elements in the dtype of tokens."""
        num, n, k = self.data.shape[0], self.num_out, self.num_in
        for each in (self.data, self.scales, self.offsets, self.bias):
            assert each is None or each.is_contiguous(), "matrices, scales, offsets and biases: contiguous"
        assert self.bias is None or self.bias.shape == (num, n), f"bias {tuple(self.bias.shape)}: [{num}, {n}] needed"
        if self.scales is None:
            assert self.data.dtype == dtype, f"{self.data.dtype}: elements of {dtype} needed"
        elif self.form is Form.BYTES:
            self.check_codes(is_gated=is_gated)
        elif self.form is Form.INT4:
            self._check_int4(self.scales)
        else:
            assert self.data.dtype == torch.uint8 and k % 32 == 0, f"{self.data.dtype}, {k} columns: no MXFP4"
            assert self.scales.shape == (num, n, k // 32), f"scales {tuple(self.scales.shape)}: [{num}, {n}, {k} / 32]"

    def check_codes(self, *, is_gated: bool) -> None:
        """Require codes of 8 bits and scales that fit; of gate and up, no rows of both may share a scale."""
        num, n, k = self.data.shape
        assert self.scales is not None and self.data.dtype in CODES, f"{self.data.dtype}: no codes"
        shapes = [(num, n, 1), *((num, rows, -(-k // GROUP)) for rows in (n, -(-n // GROUP)))]
        assert self.scales.dtype == torch.float32 and self.scales.shape in shapes, (
            f"scales {tuple(self.scales.shape)} {self.scales.dtype}: fp32, one of {shapes} needed"
        )
        assert self.scales.is_contiguous(), "scales: contiguous"
        assert not is_gated or n // 2 % self.scale_rows == 0, f"{n} rows of gate and up share scales of {GROUP} rows"

    def _check_int4(self, scales: Tensor) -> None:
        num, n, k = self.data.shape[0], self.num_out, self.num_in
        assert self.data.dtype == torch.uint8 and k % GROUP == 0, f"{self.data.dtype}, {k} columns: no blocks of codes"
        assert scales.shape[:2] == (num, n) and scales.dtype in (torch.float16, torch.float32), (
            f"scales {tuple(scales.shape)} {scales.dtype}: fp16 or fp32, [{num}, {n}, groups] needed"
        )
        groups = scales.shape[2]
        group = k // max(groups, 1)
        assert group * groups == k and (group in (32, 64) or group % GROUP == 0), f"{groups} groups of {k} columns"
        assert self.offsets is None or (self.offsets.shape, self.offsets.dtype) == (scales.shape, scales.dtype), (
            "offsets: as the scales"
        )


PACKED = (Form.MXFP4, Form.INT4)
"""Forms with two elements a byte."""
