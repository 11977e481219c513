"""Limits of kernels for weights in MXFP4, which are known only when a checkpoint's scales are on the device."""

import torch
from torch import Tensor

from common.base.errors import ModelError
from common.base.mxfp4 import GROUP
from common.kernels.base.expert_operands import MXFP4_SCALES
from common.models.base import Model

LEAST, MOST = MXFP4_SCALES[0], MXFP4_SCALES[-1]
MAGNITUDES = 0x77  # bits of both values of a byte, without signs


def check_scales(model: Model) -> None:
    """Raise ModelError for a scale that kernels compute wrongly in bfloat16."""
    for name, values, scales in model.mxfp4_weights():
        scale = _wrong_scale(values, scales)
        if scale is not None:
            raise ModelError(
                f"{name} has a scale of {scale}: kernels compute {LEAST} to {MOST} (2^{LEAST - 127} to "
                f'2^{MOST - 127}) in bfloat16; set model.dtype to "float32", kernels.experts to "torch", which is '
                'slow, or worker.device to "cpu"'
            )


def _wrong_scale(values: Tensor, scales: Tensor) -> int | None:
    """Return a scale beyond the limits, but a small scale only if one of its values is not 0."""
    least, most = (int(each) for each in torch.aminmax(scales))
    if most > MOST:
        return most
    if least >= LEAST:
        return None
    small = scales < LEAST
    has_values = (values.unflatten(-1, (-1, GROUP // 2))[small] & MAGNITUDES).ne(0).any(-1)
    return int(scales[small][has_values].min()) if bool(has_values.any()) else None
