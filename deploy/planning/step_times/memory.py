"""Room for KV on a GPU, and sizes of prompt steps, by the workers' own rules."""

import math
from dataclasses import dataclass

from common.device.engine.step_rules import (
    CHUNK_PART,
    CUDA_CONTEXT_BYTES,
    STEP_PART,
    TYPICAL_TOKENS,
    fitting_tokens,
)
from common.settings.config import GPU_CHUNK_TOKENS, GPU_STEP_TOKENS, DecodeSection, PrefillSection
from common.settings.memory_sections import KVSection
from common.wire.values.kv_layout import STEP_DIVISOR
from deploy.planning.step_times.shape import ModelShape
from deploy.processes.placement import SERVER_BYTES

MEMORY_FRACTION = KVSection().memory_fraction
"""Share of a GPU's memory for all its workers."""


@dataclass(frozen=True, slots=True)
class Room:
    """Division of a GPU's memory."""

    shape: ModelShape
    memory_bytes: int  # of the GPU
    fraction: float = MEMORY_FRACTION

    @property
    def beside_weights(self) -> int:
        """Bytes for KV blocks and the steps of workers; below 0 without room for the weights."""
        return int(self.memory_bytes * self.fraction) - SERVER_BYTES - self.shape.weight_bytes

    @property
    def step_tokens(self) -> int:
        """Default tokens of a prompt step."""
        return fitting_tokens(GPU_STEP_TOKENS, self.shape, self.beside_weights // STEP_PART)

    def kv_tokens(self, num_prefill: int, num_decode: int) -> int:
        """Return tokens of KV beside the steps of the workers; 0 without room.

        With windows or states, tokens of sequences of TYPICAL_TOKENS.
        """
        chunk_tokens = fitting_tokens(GPU_CHUNK_TOKENS, self.shape, self.beside_weights // CHUNK_PART)
        prefill = self.shape.activation_bytes(self.step_tokens, PrefillSection().max_num_seqs)
        decode = self.shape.activation_bytes(chunk_tokens, DecodeSection().max_num_seqs)
        workers = num_prefill * (prefill + CUDA_CONTEXT_BYTES) + num_decode * (decode + CUDA_CONTEXT_BYTES)
        pool_bytes = max(0, self.beside_weights - workers)
        pool_bytes -= min(self.step_tokens * self.shape.window_bytes, pool_bytes // STEP_DIVISOR)
        return int(pool_bytes * TYPICAL_TOKENS / self.shape.context_bytes(TYPICAL_TOKENS))

    def taken(self, num_tokens: int, num_before: int = 0) -> int:
        """Return the tokens of `kv_tokens` that a sequence takes, by its bytes, because groups lend memory.

        Args:
            num_tokens: of the sequence's own.
            num_before: held once for many sequences.
        """
        shape = self.shape
        in_window = min(num_tokens + num_before, shape.window) * shape.window_bytes
        num_bytes = num_tokens * shape.kv_bytes + in_window + shape.state_bytes
        return math.ceil(num_bytes * TYPICAL_TOKENS / shape.context_bytes(TYPICAL_TOKENS))
