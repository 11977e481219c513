"""Sampling parameters as tensors, with the columns declared by the wire."""

from collections.abc import Sequence

import torch

from common.kernels.base.operands import SamplingTensors
from common.wire.values.sampling_params import SAMPLING_COLUMNS, SamplingParams


def sampling_tensors(params: Sequence[SamplingParams], device: torch.device) -> SamplingTensors:
    """Build tensors with a row for each of `params`."""
    return SamplingTensors(
        **{
            column.name: torch.tensor(column.values(params), dtype=getattr(torch, column.dtype), device=device)
            for column in SAMPLING_COLUMNS
        }
    )
