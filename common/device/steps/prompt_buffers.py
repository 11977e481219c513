"""Inputs of a prompt step: filled on the host in place, uploaded in few copies, read at fixed addresses.

A captured graph needs fixed addresses. A single piece of memory spares a short prompt a dozen little copies. A step is
staged while an earlier step is still queued. So host inputs take turns in `NUM_STAGINGS` pinned pieces; device inputs
follow in launch order.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.device.steps.adjustments import Adjustments, SlotFill
from common.kernels.base.sampling_operands import SamplingTensors
from common.ops.base import ForwardBatch
from common.wire.values.pool_shape import PoolShape
from common.wire.values.sampling_params import PADDING, SAMPLING_COLUMNS, SamplingParams

NUM_STAGINGS = 2
ALIGNMENT = 16
"""Alignment of every input in bytes, because kernels are recompiled for addresses with less."""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens `[start, start + len(token_ids))` of a sequence."""

    token_ids: Sequence[int]
    start: int
    tables: Sequence[Sequence[int]]  # block ids by group and place, at least up to the chunk's end
    sampling: SamplingParams
    is_last: bool  # the prompt ends with the chunk, so a token is sampled
    sequence_ids: Sequence[int] = ()  # all tokens of the sequence, if logits are adjusted or its prompt is scored
    num_outputs: int = 0  # outputs at the end of `sequence_ids`
    mask: np.ndarray | None = None  # [cdiv(vocab, 32)] int32: tokens allowed by a grammar after the prompt
    found_states: Sequence[tuple[int, int]] = ()  # blocks to copy before the step: source and target
    snapshots: Sequence[tuple[int, int]] = ()  # blocks to copy behind the step, likewise
    num_prompt_logprobs: int = 0  # log-probabilities at each prompt position: the token's and the likeliest
    first_scored: int = 0  # first prompt position with log-probabilities

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def adjusts(self) -> bool:
        """Tell whether logits are changed before sampling."""
        return self.is_last and self.sampling.adjusts_logits

    @property
    def has_logprobs(self) -> bool:
        """Tell whether log-probabilities of the sampled token are requested."""
        return self.is_last and self.sampling.num_logprobs > 0

    @property
    def scored(self) -> range:
        """Positions of prompt tokens scored by the chunk: each position follows a token of the chunk."""
        if not self.num_prompt_logprobs:
            return range(0)
        num_prompt = len(self.sequence_ids) - self.num_outputs
        return range(max(self.start + 1, self.first_scored), min(self.end + 1, num_prompt))


Shapes = dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]]
"""Shape and type of each input; tables come last."""


class _Staging:
    """Inputs of a step on the host, with the event of their upload."""

    def __init__(self, shapes: Shapes, num_bytes: int, device: torch.device) -> None:
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.arrays: dict[str, np.ndarray] = {}
        for name, begin, end, shape, dtype in _places(shapes):
            self.arrays[name] = self.memory[begin:end].numpy().view(dtype).reshape(shape)
        self.uploaded: torch.cuda.Event | None = None

    def claim(self) -> None:
        """Wait until the memory may be written again; waits only if steps pile up."""
        if self.uploaded is not None:
            self.uploaded.synchronize()


class PromptBuffers:
    """Room for `max_tokens` tokens of `max_seqs` sequences of up to `max_len` tokens."""

    def __init__(
        self, max_tokens: int, max_seqs: int, max_len: int, pool: PoolShape, vocab: int, device: torch.device
    ) -> None:
        self.begins = pool.begins
        self.groups = pool.layout.groups
        self.tables = [f"block_tables.{number}" for number in range(len(self.begins))]
        self.slots = [f"slots.{number}" for number in range(len(self.begins))]
        self.adjustments = Adjustments(max_seqs, vocab, device)
        self.max_tokens, self.max_seqs, self.max_len = max_tokens, max_seqs, max_len
        num_places = [group.num_places(max_len) for group in pool.layout.groups]
        shapes = _shapes(max_tokens, max_seqs, self.slots, dict(zip(self.tables, num_places, strict=True)))
        *_, (_, _, num_bytes, _, _) = _places(shapes)
        self._stagings = deque(_Staging(shapes, num_bytes, device) for _ in range(NUM_STAGINGS))
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._views: dict[str, Tensor] = {}
        for name, begin, end, shape, dtype in _places(shapes):
            device_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
            self._views[name] = self._device[begin:end].view(device_dtype).view(shape)
        self._table_places = [place for place in _places(shapes) if place[0] in self.tables]

    def fill(self, chunks: Sequence[PromptChunk], num_tokens: int, num_seqs: int) -> None:
        """Stage and upload the chunks, padded to `num_tokens` tokens and `num_seqs` sequences.

        Padding tokens have slot -1 and belong to no sequence; padding sequences are empty. Padding and chunks inside a
        prompt get a sampled token, too, to be ignored.
        """
        self._stagings.rotate(-1)
        self._stagings[0].claim()
        begin = 0
        for row, chunk in enumerate(chunks):
            self._fill_tokens(chunk, begin)
            begin += len(chunk.token_ids)
            self._fill_sequence(row, chunk, begin)
        for name in self.slots:
            self._host_of(name)[begin:num_tokens] = -1
        for name in ("token_ids", "positions"):
            self._host_of(name)[begin:num_tokens] = 0
        for name in ("seq_lens", "last_tokens", "next_positions"):
            self._host_of(name)[len(chunks) : num_seqs] = 0
        for column in SAMPLING_COLUMNS:
            self._host_of(column.name)[len(chunks) : num_seqs] = getattr(PADDING, column.name)
        self._host_of("state_slots")[len(chunks) : num_seqs] = -1
        self._host_of("cu_seqlens")[len(chunks) + 1 : num_seqs + 1] = begin
        self._upload(len(chunks))
        self.adjustments.fill(
            [
                SlotFill(row, chunk.sampling, chunk.sequence_ids, chunk.num_outputs, chunk.mask)
                for row, chunk in enumerate(chunks)
                if chunk.adjusts
            ]
        )

    def forward_batch(
        self, num_tokens: int, num_seqs: int, *, max_query_len: int, max_seq_len: int, num_keys: int
    ) -> ForwardBatch:
        """Return views of the first tokens and sequences."""
        return ForwardBatch(
            token_ids=self._view("token_ids", num_tokens),
            positions=self._view("positions", num_tokens),
            slots=tuple(self._view(name, num_tokens) for name in self.slots),
            block_tables=tuple(self._view(table, num_seqs) for table in self.tables),
            seq_lens=self._view("seq_lens", num_seqs),
            cu_seqlens=self._view("cu_seqlens", num_seqs + 1),
            last_tokens=self._view("last_tokens", num_seqs),
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            num_keys=num_keys,
        )

    def sampling(self, num_seqs: int) -> tuple[SamplingTensors, Tensor]:
        """Return sampling parameters of the first sequences, and positions of the tokens to sample."""
        tensors = SamplingTensors(**{column.name: self._view(column.name, num_seqs) for column in SAMPLING_COLUMNS})
        return tensors, self._view("next_positions", num_seqs)

    def state_slots(self, num_seqs: int) -> Tensor:
        """Return the adjustment slots of the first sequences, -1 for none."""
        return self._view("state_slots", num_seqs)

    def _fill_tokens(self, chunk: PromptChunk, begin: int) -> None:
        end = begin + len(chunk.token_ids)
        positions = np.arange(chunk.start, chunk.end)
        self._host_of("token_ids")[begin:end] = chunk.token_ids
        self._host_of("positions")[begin:end] = positions
        groups = zip(self.slots, self.groups, self.begins, chunk.tables, strict=True)
        for name, group, first_block, table in groups:
            size = group.block_size
            places = positions // size if group.grows else np.zeros_like(positions)  # a state has a single place
            blocks = np.asarray(table, dtype=np.int64)[places] - first_block
            self._host_of(name)[begin:end] = blocks * size + positions % size

    def _fill_sequence(self, row: int, chunk: PromptChunk, tokens_end: int) -> None:
        for name, begin, block_ids in zip(self.tables, self.begins, chunk.tables, strict=True):
            self._host_of(name)[row, : len(block_ids)] = _within(block_ids, begin)
        values = {"seq_lens": chunk.end, "last_tokens": tokens_end - 1, "next_positions": chunk.end}
        values["state_slots"] = row if chunk.adjusts else -1
        values |= {column.name: getattr(chunk.sampling, column.name) for column in SAMPLING_COLUMNS}
        for name, value in values.items():
            self._host_of(name)[row] = value
        self._host_of("cu_seqlens")[row + 1] = tokens_end

    def _upload(self, num_seqs: int) -> None:
        """Copy all small inputs at once, then the used rows of each block table."""
        host, (_, tables_begin, *_) = self._stagings[0].memory, self._table_places[0]
        pieces = [slice(0, tables_begin)]
        for name, begin, *_ in self._table_places:
            pieces.append(slice(begin, begin + num_seqs * self._host_of(name).strides[0]))
        for piece in pieces:
            self._device[piece].copy_(host[piece], non_blocking=True)
        if self._device.is_cuda:
            self._stagings[0].uploaded = torch.cuda.Event()
            self._stagings[0].uploaded.record()

    def _host_of(self, name: str) -> np.ndarray:
        return self._stagings[0].arrays[name]

    def _view(self, name: str, count: int) -> Tensor:
        return self._views[name][:count]


def _within(block_ids: Sequence[int], begin: int) -> np.ndarray:
    """Return block ids relative to a group's first block, as in the group's cache; negative ids are kept."""
    ids = np.asarray(block_ids, dtype=np.int32)
    return np.where(ids < 0, ids, ids - begin) if begin else ids


def _shapes(max_tokens: int, max_seqs: int, slots: list[str], num_places: dict[str, int]) -> Shapes:
    seqs, tokens = (max_seqs,), (max_tokens,)
    return {
        **{name: (tokens, np.dtype(np.int64)) for name in slots},
        "last_tokens": (seqs, np.dtype(np.int64)),
        "token_ids": (tokens, np.dtype(np.int32)),
        "positions": (tokens, np.dtype(np.int32)),
        "seq_lens": (seqs, np.dtype(np.int32)),
        "cu_seqlens": ((max_seqs + 1,), np.dtype(np.int32)),
        "next_positions": (seqs, np.dtype(np.int32)),
        "state_slots": (seqs, np.dtype(np.int32)),
        **{column.name: (seqs, np.dtype(column.dtype)) for column in SAMPLING_COLUMNS},
        **{name: ((max_seqs, count), np.dtype(np.int32)) for name, count in num_places.items()},
    }


def _places(shapes: Shapes) -> Iterator[tuple[str, int, int, tuple[int, ...], np.dtype[np.generic]]]:
    """Yield (name, begin, end, shape, type) of each input, in bytes from the start of the memory."""
    begin = 0
    for name, (shape, dtype) in shapes.items():
        end = begin + int(np.prod(shape)) * dtype.itemsize
        yield name, begin, end, shape, dtype
        begin = -(-end // ALIGNMENT) * ALIGNMENT
