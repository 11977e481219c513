"""Division of a device's memory: tokens of a prompt step, and the number of KV blocks that fit beside all steps.

A step's memory grows with its tokens, and KV blocks get only the rest. So steps are smaller where memory is short.

Workers of a device share a pool, made by the first worker. So the pool's size follows from settings common to all
workers, and not from the maker. The pool leaves room for the steps of every worker still to come.
"""

import logging
from dataclasses import replace

import torch

from common.base.errors import ConfigError
from common.device.engine import step_rules
from common.device.engine.served_model import served_model
from common.device.engine.step_rules import CHUNK_PART, CUDA_CONTEXT_BYTES, STEP_PART, StepSize, fitting_tokens
from common.kernels.attention.query_parts import query_parts_bytes
from common.kernels.attention.shared_parts import MAX_SHARED_DIM, most_shared_slots, shared_parts_bytes
from common.kernels.base.gpu import Gpu, gpu_of
from common.memory.base.host_ram import ram_bytes
from common.models.base import ModelConfig
from common.models.loader import model_bytes, resolve_dtype
from common.settings.config import Config
from common.wire.values.kv_layout import KVLayout
from common.wire.values.pool_shape import PoolShape

logger = logging.getLogger(__name__)


def pool_shape(
    config: Config, model_config: ModelConfig, layout: KVLayout, device: torch.device, max_len: int
) -> PoolShape:
    """Return the shape of the pool shared by all workers of a device.

    Raises ConfigError when there is room for too few blocks.

    Args:
        max_len: tokens of the longest sequence.
    """
    dtype = resolve_dtype(config.model.dtype, model_config, device)
    if config.kv.pool_bytes:
        pool_bytes = config.kv.pool_bytes
    elif device.type == "cpu":
        pool_bytes = config.kv.cpu_pool_bytes
    else:
        room_bytes = bytes_beside_weights(config, model_config, device, dtype)
        pool_bytes = room_bytes - _workers_bytes(config, model_config, device, max_len)
    if device.type == "cpu":
        _warn_of_little_ram(pool_bytes + model_bytes(model_config, dtype))
    of_decode = config.decode.on(device.type).local_chunk_tokens  # prompts are computed there, too
    step_tokens = min(max(prompt_step(config, device, max_len).num_tokens, of_decode), max_len)
    shape = PoolShape.within(pool_bytes, layout, step_rules.TYPICAL_TOKENS, max_len, step_tokens)
    if min(shape.num_blocks) < 4:
        sizes = ", ".join(f"{group.block_bytes / 1e6:.2f}" for group in layout.groups)
        raise ConfigError(
            f"{pool_bytes / 1e9:.2f} GB are left for KV blocks of {sizes} MB each; raise "
            "kv.memory_fraction or kv.pool_bytes, or lower the batch limits, kv.prefill_sharers or kv.decode_sharers"
        )
    return shape


def _warn_of_little_ram(needed_bytes: int) -> None:
    """Warn of weights and pool beyond RAM; the first worker to touch shared memory is charged, and may be killed."""
    if needed_bytes > (had_bytes := ram_bytes()):
        logger.warning(
            "weights and KV blocks take %.2f GB when they are full, and this process may have %.2f GB: it may be "
            "killed then; raise its container's memory limit, or lower kv.cpu_pool_bytes",
            needed_bytes / 1e9,
            had_bytes / 1e9,
        )


def sized(config: Config, device: torch.device) -> Config:
    """Return `config` with step sizes, equal for all workers of a device. Raises ModelError for a wrong model."""
    prefill, decode = config.prefill.on(device.type), config.decode.on(device.type)
    if device.type == "cuda" and not config.kv.pool_bytes:
        model = served_model(config, device)
        room_bytes = bytes_beside_weights(config, model, device, resolve_dtype(config.model.dtype, model, device))
        if not config.prefill.max_batch_tokens:
            most = fitting_tokens(prefill.max_batch_tokens, model, room_bytes // STEP_PART)
            prefill = replace(prefill, max_batch_tokens=most)
        if not config.decode.local_chunk_tokens:
            most = fitting_tokens(decode.local_chunk_tokens, model, room_bytes // CHUNK_PART)
            decode = replace(decode, local_chunk_tokens=most)
    return replace(config, prefill=prefill, decode=decode)


def bytes_beside_weights(config: Config, model_config: ModelConfig, device: torch.device, dtype: str) -> int:
    """Return the bytes of a GPU for KV blocks and workers."""
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    return int(config.kv.memory_fraction * total_bytes) - model_bytes(model_config, dtype)


def prompt_step(config: Config, device: torch.device, max_len: int) -> StepSize:
    """Return the largest step of a prefill worker; without chunking, a step holds at least a whole prompt."""
    section = config.prefill.on(device.type)
    num_tokens = section.max_batch_tokens if section.chunking else max(section.max_batch_tokens, max_len)
    return StepSize(num_tokens, section.max_num_seqs)


def decode_step(config: Config, device: torch.device) -> StepSize:
    """Return the largest step of a decode worker, which may hold a chunk of a prompt."""
    section = config.decode.on(device.type)
    return StepSize(section.local_chunk_tokens, section.max_num_seqs)


def _workers_bytes(config: Config, model_config: ModelConfig, device: torch.device, max_len: int) -> int:
    """Return the bytes of all workers of the pool, besides pool and weights."""
    steps = (
        (config.kv.prefill_sharers, prompt_step(config, device, max_len)),
        (config.kv.decode_sharers, decode_step(config, device)),
    )
    gpu = gpu_of(device)
    parts_bytes = sum(
        query_parts_bytes(heads.num_kv_heads, heads.head_dim, gpu) for heads in model_config.heads if heads
    )
    each_bytes = model_config.table_bytes(max_len) + parts_bytes + CUDA_CONTEXT_BYTES
    of_steps = sum(
        count * (model_config.activation_bytes(*step) + _latent_bytes(model_config, step, gpu) + each_bytes)
        for count, step in steps
    )
    of_rows = _parts_bytes(config, model_config, device) + _shared_bytes(config, model_config, device)
    return of_steps + config.kv.decode_sharers * of_rows


def _parts_bytes(config: Config, model_config: ModelConfig, device: torch.device) -> int:
    """Return a decode worker's bytes for parts of contexts that several programs read."""
    from common.ops.workspaces import parts_bytes  # imports Triton, which may be missing where no GPU is

    gpu, max_rows = gpu_of(device), config.decode.on(device.type).max_num_seqs
    return sum(parts_bytes(max_rows, *heads, gpu) for heads in model_config.heads if heads)


def _shared_bytes(config: Config, model_config: ModelConfig, device: torch.device) -> int:
    """Return a decode worker's bytes for reading prefixes shared by rows once."""
    gpu, max_rows = gpu_of(device), config.decode.on(device.type).max_num_seqs
    if not (config.decode.share_prefixes and gpu.is_hopper):
        return 0
    num_slots = most_shared_slots(gpu)
    return sum(
        shared_parts_bytes(max_rows, num_slots, heads.num_kv_heads, heads.head_dim)
        for heads in model_config.heads
        if heads and heads.head_dim <= MAX_SHARED_DIM
    )


def _latent_bytes(model_config: ModelConfig, step: StepSize, gpu: Gpu) -> int:
    """Return a worker's bytes for parts of contexts, and for keys and values that are expanded from latents."""
    if not model_config.latents:
        return 0
    from common.ops.cuda_latent import room_bytes  # imports Triton, which may be missing where no GPU is

    rows = step.num_logit_rows
    return sum(room_bytes(each.num_heads, each.rank, each.entry_dim, rows, gpu) for each in model_config.latents)


def log_use() -> None:
    """Log the device memory taken by a worker's steps, at the end of the worker."""
    if torch.cuda.is_initialized():
        taken_gb = torch.cuda.max_memory_reserved() / 1e9
        logger.info("steps took up to %.2f GB of device memory, beside what CUDA itself takes", taken_gb)
