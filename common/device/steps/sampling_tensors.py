"""Sampling parameters as tensors: what follows from the columns that the wire declares."""

from collections.abc import Sequence

import torch

from common.kernels.base.operands import SamplingTensors
from common.wire.values.sampling_params import SAMPLING_COLUMNS, SamplingParams


def sampling_tensors(params: Sequence[SamplingParams], device: torch.device) -> SamplingTensors:
    """A row for each."""
    return SamplingTensors(
        **{
            column.name: torch.tensor(column.values(params), dtype=getattr(torch, column.dtype), device=device)
            for column in SAMPLING_COLUMNS
        }
    )
