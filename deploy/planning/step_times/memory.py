"""Room for KV on a GPU, and sizes of prompt steps, by the workers' own rules."""

from dataclasses import dataclass

from common.device.engine.step_rules import (
    CHUNK_PART,
    CUDA_CONTEXT_BYTES,
    STEP_PART,
    fitting_tokens,
)
from common.settings.config import GPU_CHUNK_TOKENS, GPU_STEP_TOKENS, DecodeSection, PrefillSection
from common.settings.memory_sections import KVSection
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
        """Return tokens of KV beside the steps of the workers; 0 without room."""
        chunk_tokens = fitting_tokens(GPU_CHUNK_TOKENS, self.shape, self.beside_weights // CHUNK_PART)
        prefill = self.shape.activation_bytes(self.step_tokens, PrefillSection().max_num_seqs)
        decode = self.shape.activation_bytes(chunk_tokens, DecodeSection().max_num_seqs)
        workers = num_prefill * (prefill + CUDA_CONTEXT_BYTES) + num_decode * (decode + CUDA_CONTEXT_BYTES)
        return max(0, self.beside_weights - workers) // self.shape.kv_bytes
