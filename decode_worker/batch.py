"""Every tensor that a decode step reads or writes: allocated once, because graphs know them by address.

State lives on the device and advances there: a step leaves each row ready for the next one, so the
next can be launched before the host has seen this one's tokens. The host only writes what changed
(`apply`), in stream order between two steps. A row with seq_len 0 is padding.
"""

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from common.ops.base import ForwardBatch, SamplingTensors
from decode_worker.rows import Change, Clear, Fill, Grow, Move
from decode_worker.sequence import Sequence


class DecodeBatch:
    """Row state of up to `max_rows` sequences of up to `max_len` tokens."""

    def __init__(self, max_rows: int, max_len: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.device = device
        self.max_len = max_len
        max_blocks = -(-max_len // block_size)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.token_ids = zeros(max_rows, dtype=torch.int32)  # [max_rows]: the last token, its KV not written
        self.positions = zeros(max_rows, dtype=torch.int32)  # [max_rows]: of that token
        self.seq_lens = zeros(max_rows, dtype=torch.int32)  # [max_rows]: positions + 1; 0 for padding
        self.block_tables = zeros(max_rows, max_blocks, dtype=torch.int32)  # [max_rows, max_blocks]
        self.sampling = SamplingTensors(  # each [max_rows]
            temperature=zeros(max_rows, dtype=torch.float32),
            top_k=zeros(max_rows, dtype=torch.int32),
            top_p=zeros(max_rows, dtype=torch.float32),
            min_p=zeros(max_rows, dtype=torch.float32),
            seed=zeros(max_rows, dtype=torch.int64),
        )
        self.cu_seqlens = torch.arange(max_rows + 1, dtype=torch.int32, device=device)  # [max_rows + 1]

    def forward_batch(self, num_rows: int) -> ForwardBatch:
        """The first rows, as the model wants them; slots are computed from the block tables."""
        positions = self.positions[:num_rows]
        tables = self.block_tables[:num_rows]
        blocks = tables.gather(1, (positions // self.block_size).long().unsqueeze(1)).squeeze(1).long()
        slots = blocks * self.block_size + positions % self.block_size
        return ForwardBatch(
            token_ids=self.token_ids[:num_rows],
            positions=positions,
            slot_mapping=torch.where(self.seq_lens[:num_rows] > 0, slots, -1),
            block_tables=tables,
            seq_lens=self.seq_lens[:num_rows],
            cu_seqlens=self.cu_seqlens[: num_rows + 1],
            logit_rows=None,
            max_query_len=1,
            max_seq_len=self.max_len,
        )

    def sampling_rows(self, num_rows: int) -> SamplingTensors:
        """Sampling parameters of the first rows."""
        sampling = self.sampling
        return SamplingTensors(
            temperature=sampling.temperature[:num_rows],
            top_k=sampling.top_k[:num_rows],
            top_p=sampling.top_p[:num_rows],
            min_p=sampling.min_p[:num_rows],
            seed=sampling.seed[:num_rows],
        )

    def advance(self, sampled: Tensor) -> None:
        """Make the sampled tokens `[num_rows]` int32 the last ones of their rows; padding stays padding."""
        num_rows = sampled.shape[0]
        alive = (self.seq_lens[:num_rows] > 0).int()
        self.token_ids[:num_rows].copy_(sampled)
        self.positions[:num_rows] += alive
        self.seq_lens[:num_rows] += alive

    def apply(self, changes: list[Change]) -> None:
        """Bring the tensors up to date, in the log's order; runs of growth go up together."""
        grown: list[Grow] = []
        for change in changes:
            if isinstance(change, Grow):
                grown.append(change)
                continue
            self._grow(grown)
            grown = []
            match change:
                case Fill():
                    self._fill(change.row, change.sequence)
                case Move():
                    self._move(change.source, change.target)
                case Clear():
                    self.seq_lens[change.row] = 0
                    self.positions[change.row] = 0
                    self.sampling.temperature[change.row] = 0.0
        self._grow(grown)

    def _fill(self, row: int, sequence: Sequence) -> None:
        params = sequence.sampling
        num_tokens = len(sequence.token_ids)
        whole = [sequence.token_ids[-1], num_tokens - 1, num_tokens, params.top_k, params.seed, *sequence.block_ids]
        fractions = [params.temperature, params.top_p, params.min_p]
        ints, floats = self._upload(whole, np.int64), self._upload(fractions, np.float32)
        for target, source in (
            (self.token_ids, ints[0]),
            (self.positions, ints[1]),
            (self.seq_lens, ints[2]),
            (self.sampling.top_k, ints[3]),
            (self.sampling.seed, ints[4]),
            (self.sampling.temperature, floats[0]),
            (self.sampling.top_p, floats[1]),
            (self.sampling.min_p, floats[2]),
        ):
            target[row].copy_(source)
        self.block_tables[row, : len(sequence.block_ids)].copy_(ints[5:])

    def _move(self, source: int, target: int) -> None:
        sampling = self.sampling
        for state in (
            self.token_ids,
            self.positions,
            self.seq_lens,
            self.block_tables,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.seed,
        ):
            state[target].copy_(state[source])

    def _grow(self, grown: list[Grow]) -> None:
        if grown:
            entries = self._upload([(g.row, g.index, g.block_id) for g in grown], np.int64).unbind(1)
            self.block_tables.index_put_((entries[0], entries[1]), entries[2].int())

    def _upload(self, values: SequenceOf[object], dtype: type[np.generic]) -> Tensor:
        """Host values on the device, without waiting for the stream."""
        host = torch.from_numpy(np.asarray(values, dtype=dtype))
        if self.device.type == "cpu":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)
