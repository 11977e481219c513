"""Default numbers of prompt tokens in a step: fewer where memory is short.

A step's memory grows with its tokens, and KV blocks get only the rest.
"""

from dataclasses import replace
from pathlib import Path

import torch

from common.device.engine.pool_budget import StepSize, bytes_beside_weights, step_bytes
from common.models.decoder import DecoderConfig
from common.models.loader import read_config, resolve_dtype
from common.settings.config import Config

STEP_PART, CHUNK_PART = 6, 16
"""Divisors of memory beside the weights: largest prefill step, largest decode-worker chunk."""
FEWEST_TOKENS = 512
"""Fewer tokens leave a GPU idle."""


def sized(config: Config, device: torch.device) -> Config:
    """Return `config` with step sizes, equal for all workers of a device. Raises ModelError for a wrong model."""
    prefill, decode = config.prefill.on(device.type), config.decode.on(device.type)
    if device.type == "cuda" and not config.kv.pool_bytes:
        model = read_config(Path(config.model.path))
        room_bytes = bytes_beside_weights(config, model, device, resolve_dtype(config.model.dtype, model, device))
        if not config.prefill.max_batch_tokens:
            most = _fitting(prefill.max_batch_tokens, model, room_bytes // STEP_PART)
            prefill = replace(prefill, max_batch_tokens=most)
        if not config.decode.local_chunk_tokens:
            most = _fitting(decode.local_chunk_tokens, model, room_bytes // CHUNK_PART)
            decode = replace(decode, local_chunk_tokens=most)
    return replace(config, prefill=prefill, decode=decode)


def _fitting(num_tokens: int, model: DecoderConfig, num_bytes: int) -> int:
    """Halve `num_tokens` until a step takes at most `num_bytes`, but not below FEWEST_TOKENS."""
    while num_tokens > FEWEST_TOKENS and step_bytes(model, StepSize(num_tokens, 0)) > num_bytes:
        num_tokens //= 2
    return num_tokens
