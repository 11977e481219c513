"""Room for KV on a GPU, and sizes of prompt steps: the workers' own rules, without torch.

A test compares the rules with `common/device/engine/pool_budget.py` and `common/device/engine/step_sizes.py`.
"""

from dataclasses import dataclass

from common.settings.config import GPU_CHUNK_TOKENS, GPU_STEP_TOKENS, DecodeSection, PrefillSection
from deploy.planning.step_times.shape import ModelShape
from deploy.processes.placement import SERVER_BYTES

CUDA_CONTEXT_BYTES = 1 << 30
STEP_PART, CHUNK_PART, FEWEST_TOKENS = 6, 16, 512
MEMORY_FRACTION = 0.85
"""Share of a GPU's memory for all its workers: `kv.memory_fraction`."""


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
        return self._fitting(GPU_STEP_TOKENS, STEP_PART)

    def kv_tokens(self, num_prefill: int, num_decode: int) -> int:
        """Return tokens of KV beside the steps of the workers; 0 without room."""
        chunk_tokens = self._fitting(GPU_CHUNK_TOKENS, CHUNK_PART)
        prefill = step_bytes(self.shape, self.step_tokens, PrefillSection().max_num_seqs)
        decode = step_bytes(self.shape, chunk_tokens, DecodeSection().max_num_seqs)
        workers = num_prefill * (prefill + CUDA_CONTEXT_BYTES) + num_decode * (decode + CUDA_CONTEXT_BYTES)
        return max(0, self.beside_weights - workers) // self.shape.kv_bytes

    def _fitting(self, num_tokens: int, part: int) -> int:
        while num_tokens > FEWEST_TOKENS and step_bytes(self.shape, num_tokens, 0) > self.beside_weights // part:
            num_tokens //= 2
        return num_tokens


def step_bytes(shape: ModelShape, num_tokens: int, num_logit_rows: int) -> int:
    """Return an upper bound of the bytes held by a step at once."""
    heads = (shape.num_attention_heads + shape.num_key_value_heads) * 2 * shape.head_dim
    width = heads + 3 * shape.intermediate_size + 4 * shape.hidden_size
    return 2 * (num_tokens * width * 4 + num_logit_rows * shape.vocab_size * 4 * 4)
