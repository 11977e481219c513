"""Sampling parameters as tensors and words: what follows from the columns that the wire declares."""

from collections.abc import Sequence

import numpy as np
import torch

from common.kernels.operands import SamplingTensors
from common.wire.sampling_params import SAMPLING_COLUMNS, SamplingParams


def sampling_tensors(params: Sequence[SamplingParams], device: torch.device) -> SamplingTensors:
    """A row for each."""
    return SamplingTensors(
        **{
            column.name: torch.tensor(column.values(params), dtype=getattr(torch, column.dtype), device=device)
            for column in SAMPLING_COLUMNS
        }
    )


def sampling_words(params: Sequence[SamplingParams]) -> list[np.ndarray]:
    """The columns as `RowUpdates` has them, each of one or two words a row: int32."""
    return [np.array(column.values(params), column.dtype).view(np.int32) for column in SAMPLING_COLUMNS]
