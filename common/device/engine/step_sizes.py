"""Default numbers of prompt tokens in a step: fewer where memory is short.

A step's memory grows with its tokens, and KV blocks get only the rest.
"""

from dataclasses import replace
from pathlib import Path

import torch

from common.device.engine.pool_budget import bytes_beside_weights
from common.device.engine.step_rules import CHUNK_PART, STEP_PART, fitting_tokens
from common.models.loader import resolve_dtype
from common.models.reading import read_config
from common.settings.config import Config


def sized(config: Config, device: torch.device) -> Config:
    """Return `config` with step sizes, equal for all workers of a device. Raises ModelError for a wrong model."""
    prefill, decode = config.prefill.on(device.type), config.decode.on(device.type)
    if device.type == "cuda" and not config.kv.pool_bytes:
        model = read_config(Path(config.model.path))
        room_bytes = bytes_beside_weights(config, model, device, resolve_dtype(config.model.dtype, model, device))
        if not config.prefill.max_batch_tokens:
            most = fitting_tokens(prefill.max_batch_tokens, model, room_bytes // STEP_PART)
            prefill = replace(prefill, max_batch_tokens=most)
        if not config.decode.local_chunk_tokens:
            most = fitting_tokens(decode.local_chunk_tokens, model, room_bytes // CHUNK_PART)
            decode = replace(decode, local_chunk_tokens=most)
    return replace(config, prefill=prefill, decode=decode)
