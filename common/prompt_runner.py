"""Computes chunks of prompts and samples the token after each finished one.

Stands in `common` because a decode worker computes a prompt itself when there is no prefill worker.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.engine import Engine
from common.ops.base import ForwardBatch, SamplingTensors
from common.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens `[start, start + len(token_ids))` of one sequence."""

    token_ids: list[int]
    start: int
    block_ids: list[int]  # cover at least the chunk's end
    sampling: SamplingParams
    is_last: bool  # the prompt ends here: a token is sampled


class PromptRunner:
    """Runs one ragged batch of chunks at a time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(self, chunks: list[PromptChunk]) -> list[int | None]:
        """The sampled token of each chunk that ends its prompt, None for the others.

        Returns when the GPU has finished: all KV of the chunks is in the pool.
        """
        with torch.inference_mode():
            batch = self._forward_batch(chunks)
            logits = self.engine.model.forward(batch, self.engine.ops)
            last = [chunk for chunk in chunks if chunk.is_last]
            if not last:
                self._synchronize()
                return [None] * len(chunks)
            sampled = self.engine.sampler(logits, *self._sampling_tensors(last)).tolist()
        tokens = iter(sampled)
        return [next(tokens) if chunk.is_last else None for chunk in chunks]

    def _forward_batch(self, chunks: list[PromptChunk]) -> ForwardBatch:
        block_size = self.engine.pool.layout.block_size
        lengths = [len(chunk.token_ids) for chunk in chunks]
        ends = np.cumsum([0, *lengths])
        positions = np.concatenate([np.arange(c.start, c.start + n) for c, n in zip(chunks, lengths, strict=True)])
        tables = np.zeros((len(chunks), max(len(chunk.block_ids) for chunk in chunks)), dtype=np.int32)
        for row, chunk in zip(tables, chunks, strict=True):
            row[: len(chunk.block_ids)] = chunk.block_ids
        row_of_token = np.repeat(np.arange(len(chunks)), lengths)
        slots = tables[row_of_token, positions // block_size].astype(np.int64) * block_size + positions % block_size
        # With no prompt ending here one row is computed all the same, and its logits are not used.
        logit_rows = [int(end) - 1 for end, chunk in zip(ends[1:], chunks, strict=True) if chunk.is_last] or [0]
        seq_lens = [chunk.start + n for chunk, n in zip(chunks, lengths, strict=True)]
        return ForwardBatch(
            token_ids=self._upload(np.concatenate([chunk.token_ids for chunk in chunks]), np.int32),
            positions=self._upload(positions, np.int32),
            slot_mapping=self._upload(slots, np.int64),
            block_tables=self._upload(tables, np.int32),
            seq_lens=self._upload(seq_lens, np.int32),
            cu_seqlens=self._upload(ends, np.int32),
            logit_rows=self._upload(logit_rows, np.int64),
            max_query_len=max(lengths),
            max_seq_len=max(seq_lens),
        )

    def _sampling_tensors(self, chunks: list[PromptChunk]) -> tuple[SamplingTensors, Tensor]:
        params = [chunk.sampling for chunk in chunks]
        tensors = SamplingTensors(
            temperature=self._upload([p.temperature for p in params], np.float32),
            top_k=self._upload([p.top_k for p in params], np.int32),
            top_p=self._upload([p.top_p for p in params], np.float32),
            min_p=self._upload([p.min_p for p in params], np.float32),
            seed=self._upload([p.seed for p in params], np.int64),
        )
        positions = [chunk.start + len(chunk.token_ids) for chunk in chunks]  # of the token to be sampled
        return tensors, self._upload(positions, np.int32)

    def _upload(self, values: object, dtype: type[np.generic]) -> Tensor:
        host = torch.from_numpy(np.ascontiguousarray(values, dtype=dtype))
        return host.to(self.engine.device)

    def _synchronize(self) -> None:
        if self.engine.device.type == "cuda":
            torch.cuda.current_stream(self.engine.device).synchronize()
