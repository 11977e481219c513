"""Sizes of both pools of `benchmarks.sharing`: what the largest cells need, as far as a GPU has it.

Each process has its own weights and pool. Prompt steps get what they need, and decode steps at most the rest.
"""

from dataclasses import dataclass

import torch

from benchmarks.decode_step import MORE_TOKENS
from common.device.engine.pool_budget import pool_shape
from common.device.engine.served_model import served_model
from common.device.engine.step_rules import TYPICAL_TOKENS
from common.models.loader import model_bytes, resolve_dtype, resolve_kv_dtype, resolve_max_len
from common.settings.config import Config, DecodeSection, ModelSection, PrefillSection
from common.settings.memory_sections import KVSection
from common.wire.values.kv_layout import KVLayout
from common.wire.values.pool_shape import PoolShape

MEMORY_PART = 0.9
"""Part of a GPU's memory for both processes; CUDA, MPS and both memory servers have the rest."""
MIN_BLOCKS = 4
"""Fewest blocks of a group in any pool."""
GROWTH = 1.02


@dataclass(frozen=True, slots=True)
class Pools:
    """Bytes of each process's pool."""

    decode: int
    prompt: int


@dataclass(frozen=True, slots=True)
class Texts:
    """Equal texts that a pool holds at a time."""

    number: int
    num_tokens: int  # of each

    def least_bytes(self, layout: KVLayout, max_len: int, step_tokens: int) -> int:
        """Return bytes of a pool of these texts, hardly more than the least; longer than `max_len` is no text."""
        num_tokens = min(self.num_tokens, max_len)
        counts = tuple(self.number * each for each in layout.most_blocks(num_tokens, MORE_TOKENS))
        sizes = [group.block_bytes for group in layout.groups]
        num_bytes = sum(each * size for each, size in zip(counts, sizes, strict=True)) + MIN_BLOCKS * sum(sizes)
        while True:
            shape = PoolShape.within(num_bytes, layout, TYPICAL_TOKENS, max_len, step_tokens)
            is_long = shape.most_tokens(step_tokens) >= num_tokens
            if is_long and shape.fits(counts) and min(shape.num_blocks) >= MIN_BLOCKS:
                return num_bytes
            num_bytes = int(GROWTH * num_bytes)


def prompts_of(num_tokens: int, context: int) -> Texts:
    """Return the prompts of a step: as many of `context` tokens as there is room for, or a shorter one."""
    num_prompts = max(1, num_tokens // context)
    return Texts(num_prompts, num_tokens // num_prompts)


def pools(model_dir: str, device: torch.device, rows: list[int], tokens: list[int], context: int) -> Pools:
    """Return pools for cells of such rows and tokens; on a GPU that has too little, that of decode steps is smaller.

    Raises ConfigError if weights and steps alone are too much.

    Args:
        context: tokens of a row, and of each prompt of a step.
    """
    prompts = prompts_of(max(tokens), context)
    config = Config(
        model=ModelSection(path=model_dir),
        prefill=PrefillSection(max_batch_tokens=max(tokens), max_num_seqs=prompts.number),
        decode=DecodeSection(max_num_seqs=max(rows)),
        kv=KVSection(memory_fraction=MEMORY_PART),
    )
    model = served_model(config, device)
    dtype, max_len = resolve_dtype(config.model.dtype, model, device), resolve_max_len(config.model, model)
    layout = KVLayout("", model.cache_groups(config.kv.block_size, resolve_kv_dtype("auto", model, dtype, device)))
    step_tokens = min(max_len, max(max(tokens), PrefillSection().on(device.type).max_batch_tokens))
    of_prompts = prompts.least_bytes(layout, max_len, step_tokens)
    of_rows = Texts(max(rows), context + MORE_TOKENS).least_bytes(layout, max_len, step_tokens)
    if device.type == "cuda":
        room_bytes = pool_shape(config, model, layout, device, max_len).num_bytes  # beside the steps, and weights once
        of_rows = min(of_rows, max(1, room_bytes - model_bytes(model, dtype) - of_prompts))
    return Pools(of_rows, of_prompts)
