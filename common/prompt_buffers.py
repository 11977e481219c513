"""The inputs of a prompt step: filled on the host in place, uploaded in two copies, read at fixed addresses.

Fixed addresses are what a captured graph needs, and one staging buffer is what keeps a short prompt
from waiting for a dozen little copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

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

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class _Field:
    """One array in the staging buffer and its twin on the device."""

    host: np.ndarray
    device: Tensor


class PromptBuffers:
    """Room for `max_tokens` tokens of `max_seqs` sequences of up to `max_len` tokens."""

    def __init__(self, max_tokens: int, max_seqs: int, max_len: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.max_tokens, self.max_seqs, self.max_len = max_tokens, max_seqs, max_len
        max_blocks = -(-max_len // block_size)
        seqs, tokens = (max_seqs,), (max_tokens,)
        shapes: dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]] = {
            "slot_mapping": (tokens, np.dtype(np.int64)),
            "logit_rows": (seqs, np.dtype(np.int64)),
            "seed": (seqs, np.dtype(np.int64)),
            "token_ids": (tokens, np.dtype(np.int32)),
            "positions": (tokens, np.dtype(np.int32)),
            "seq_lens": (seqs, np.dtype(np.int32)),
            "cu_seqlens": ((max_seqs + 1,), np.dtype(np.int32)),
            "next_positions": (seqs, np.dtype(np.int32)),
            "top_k": (seqs, np.dtype(np.int32)),
            "temperature": (seqs, np.dtype(np.float32)),
            "top_p": (seqs, np.dtype(np.float32)),
            "min_p": (seqs, np.dtype(np.float32)),
            "block_tables": ((max_seqs, max_blocks), np.dtype(np.int32)),
        }
        num_bytes = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in shapes.values())
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._fields: dict[str, _Field] = {}
        offset = 0
        for name, (shape, dtype) in shapes.items():
            end = offset + int(np.prod(shape)) * dtype.itemsize
            host = self._host[offset:end].numpy().view(dtype).reshape(shape)
            device_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
            self._fields[name] = _Field(host, self._device[offset:end].view(device_dtype).view(shape))
            self._tables_offset, offset = offset, end

    def fill(self, chunks: Sequence[PromptChunk], num_tokens: int, num_seqs: int) -> None:
        """Stage and upload the chunks, padded to `num_tokens` tokens and `num_seqs` sequences.

        Padding tokens have slot -1 and belong to no sequence; padding sequences are empty.
        """
        begin = 0
        for row, chunk in enumerate(chunks):
            self._fill_tokens(chunk, begin)
            begin += len(chunk.token_ids)
            self._fill_sequence(row, chunk, begin)
        self._host_of("slot_mapping")[begin:num_tokens] = -1
        for name in ("token_ids", "positions"):
            self._host_of(name)[begin:num_tokens] = 0
        for name in ("seq_lens", "temperature", "next_positions"):
            self._host_of(name)[len(chunks) : num_seqs] = 0
        self._host_of("cu_seqlens")[len(chunks) + 1 : num_seqs + 1] = begin
        # Rows that end no prompt get logits of token 0; nobody reads what is sampled from them.
        rows = [row for row, chunk in enumerate(chunks) if not chunk.is_last]
        self._host_of("logit_rows")[[*rows, *range(len(chunks), num_seqs)]] = 0
        self._upload(len(chunks))

    def forward_batch(self, num_tokens: int, num_seqs: int, *, max_query_len: int, max_seq_len: int) -> ForwardBatch:
        """Views of the first tokens and sequences."""
        return ForwardBatch(
            token_ids=self._view("token_ids", num_tokens),
            positions=self._view("positions", num_tokens),
            slot_mapping=self._view("slot_mapping", num_tokens),
            block_tables=self._view("block_tables", num_seqs),
            seq_lens=self._view("seq_lens", num_seqs),
            cu_seqlens=self._view("cu_seqlens", num_seqs + 1),
            logit_rows=self._view("logit_rows", num_seqs),
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )

    def sampling(self, num_seqs: int) -> tuple[SamplingTensors, Tensor]:
        """Sampling parameters of the first sequences, and the positions of the tokens to be sampled."""
        tensors = SamplingTensors(
            temperature=self._view("temperature", num_seqs),
            top_k=self._view("top_k", num_seqs),
            top_p=self._view("top_p", num_seqs),
            min_p=self._view("min_p", num_seqs),
            seed=self._view("seed", num_seqs),
        )
        return tensors, self._view("next_positions", num_seqs)

    def _fill_tokens(self, chunk: PromptChunk, begin: int) -> None:
        end = begin + len(chunk.token_ids)
        positions = np.arange(chunk.start, chunk.end)
        blocks = np.asarray(chunk.block_ids, dtype=np.int64)[positions // self.block_size]
        self._host_of("token_ids")[begin:end] = chunk.token_ids
        self._host_of("positions")[begin:end] = positions
        self._host_of("slot_mapping")[begin:end] = blocks * self.block_size + positions % self.block_size

    def _fill_sequence(self, row: int, chunk: PromptChunk, tokens_end: int) -> None:
        params = chunk.sampling
        self._host_of("block_tables")[row, : len(chunk.block_ids)] = chunk.block_ids
        values = {
            "seq_lens": chunk.end,
            "logit_rows": tokens_end - 1,
            "next_positions": chunk.end,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "seed": params.seed,
        }
        for name, value in values.items():
            self._host_of(name)[row] = value
        self._host_of("cu_seqlens")[row + 1] = tokens_end

    def _upload(self, num_seqs: int) -> None:
        small = slice(0, self._tables_offset)
        self._device[small].copy_(self._host[small], non_blocking=True)
        row_bytes = self._fields["block_tables"].host.strides[0]
        tables = slice(self._tables_offset, self._tables_offset + num_seqs * row_bytes)
        self._device[tables].copy_(self._host[tables], non_blocking=True)

    def _host_of(self, name: str) -> np.ndarray:
        return self._fields[name].host

    def _view(self, name: str, count: int) -> Tensor:
        return self._fields[name].device[:count]
