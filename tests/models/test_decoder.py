"""Every architecture against transformers: logits at every position, in one piece, in chunks and token by token."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.base.dtypes import DTYPES
from common.models.decoder import Decoder
from common.models.loader import load_model
from common.models.reading import architectures, read_config
from common.models.weights import Fill, Loading, WeightsLayout
from common.ops.base import ForwardBatch, Ops
from common.ops.torch_ops import TorchOps
from common.settings.config import KernelsSection
from tests.support.checkpoints import VARIANTS, VOCAB, write_checkpoint
from tests.support.layouts import allocator_of, take

Checkpoint = Callable[[str], tuple[Path, Any]]
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Backend:
    """Where and in which precision the model runs, and how close it must come."""

    device: str
    dtype: str
    mean_error: float
    p99_error: float

    def ops(self, cache: torch.Tensor, num_q_heads: int) -> Ops:
        if self.device == "cpu":
            return TorchOps([cache])
        from common.ops.cuda_ops import CudaOps
        from common.ops.workspaces import GroupCache

        return CudaOps([GroupCache(cache, num_q_heads)], KernelsSection(), 16)


CPU = Backend("cpu", "float32", 1e-5, 1e-4)
BACKENDS = [
    pytest.param(CPU, id="cpu"),
    pytest.param(Backend("cuda:0", "float32", 1e-4, 1e-3), id="cuda-float32", marks=pytest.mark.gpu),
    pytest.param(Backend("cuda:0", "bfloat16", 3e-2, 1.5e-1), id="cuda-bfloat16", marks=pytest.mark.gpu),
    pytest.param(Backend("cuda:0", "float16", 5e-3, 3e-2), id="cuda-float16", marks=pytest.mark.gpu),
]


def load(directory: Path, backend: Backend = CPU) -> Decoder:
    model, upload = load_model(
        directory,
        read_config(directory),
        max_len=512,
        dtype=backend.dtype,
        memory=OwnWeights(backend.device),
    )
    upload.wait()
    assert isinstance(model, Decoder)
    return model


class OwnWeights:
    """A region of this process."""

    def __init__(self, device: str) -> None:
        self.device = device

    def begin(self, layout: WeightsLayout, fill: Fill) -> tuple[torch.Tensor, Loading]:
        region = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self.device)
        return region, fill(region, lambda done, total: None)


class Cache:
    """A poisoned pool and scattered blocks for each sequence."""

    def __init__(self, model: Decoder, backend: Backend = CPU, num_blocks: int = 100) -> None:
        [group] = model.config.cache_groups(BLOCK_SIZE, backend.dtype)
        self.cache = torch.full(
            (num_blocks, *group.block_shape), torch.nan, dtype=DTYPES[backend.dtype], device=backend.device
        )
        self.allocator = allocator_of(num_blocks - 1)
        self.ops = backend.ops(self.cache, model.config.heads[0].num_q_heads)

    def blocks(self, num_tokens: int) -> list[int]:
        wanted = -(-num_tokens // BLOCK_SIZE)
        taken = take(self.allocator, 2 * wanted)
        self.allocator.free(taken[1::2])
        return taken[::2]


def batch_of(chunks: list[tuple[list[int], int, list[int]]], device: str = "cpu") -> ForwardBatch:
    """(token ids, start, block ids) of each sequence; logits of every token."""
    lengths = [len(ids) for ids, _, _ in chunks]
    positions = torch.cat([torch.arange(start, start + len(ids)) for ids, start, _ in chunks])
    tables = torch.zeros(len(chunks), max(len(blocks) for _, _, blocks in chunks), dtype=torch.int32)
    for row, (_, _, blocks) in zip(tables, chunks, strict=True):
        row[: len(blocks)] = torch.tensor(blocks)
    rows = torch.repeat_interleave(torch.arange(len(chunks)), torch.tensor(lengths))
    slots = tables[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    seq_lens = [start + length for (_, start, _), length in zip(chunks, lengths, strict=True)]
    return ForwardBatch(
        token_ids=torch.tensor([i for ids, _, _ in chunks for i in ids], dtype=torch.int32, device=device),
        positions=positions.int().to(device),
        slots=(slots.to(device),),
        block_tables=(tables.to(device),),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        cu_seqlens=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device),
        last_tokens=None,
        max_query_len=max(lengths),
        max_seq_len=max(seq_lens),
    )


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, backend: Backend = CPU) -> None:
    error = (ours.cpu() - theirs).abs() / theirs.abs().mean()
    assert error.mean() < backend.mean_error
    assert error.flatten().quantile(0.99) < backend.p99_error


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


def test_every_architecture_is_covered() -> None:
    assert {model_type for model_type, _ in VARIANTS.values()} == set(architectures())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_logits_equal_transformers_at_every_position(variant: str, backend: Backend, checkpoint: Checkpoint) -> None:
    directory, theirs = checkpoint(variant)
    model = load(directory, backend)
    cache = Cache(model, backend)
    ragged = prompts(1, 37, 200)
    batch = batch_of([(ids, 0, cache.blocks(len(ids))) for ids in ragged], backend.device)
    ours = model.forward(batch, cache.ops)
    expected = torch.cat([theirs(torch.tensor([ids])).logits[0] for ids in ragged])
    assert_close(ours, expected, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_chunks_of_any_size_give_the_same_logits(variant: str, backend: Backend, checkpoint: Checkpoint) -> None:
    directory, theirs = checkpoint(variant)
    model = load(directory, backend)
    cache = Cache(model, backend)
    [ids] = prompts(150)
    blocks = cache.blocks(150)
    bounds = [0, 1, 17, 64, *range(140, 151)]
    logits = [
        model.forward(batch_of([(ids[begin:end], begin, blocks)], backend.device), cache.ops)
        for begin, end in itertools.pairwise(bounds)
    ]
    assert_close(torch.cat(logits), theirs(torch.tensor([ids])).logits[0], backend)


@pytest.mark.parametrize("backend", BACKENDS)
@torch.inference_mode()
def test_logits_of_last_tokens_alone_are_theirs_among_all(backend: Backend, checkpoint: Checkpoint) -> None:
    model = load(checkpoint("qwen3-tied")[0], backend)
    some, other = Cache(model, backend), Cache(model, backend)
    ids = prompts(20, 1, 90)
    batch = batch_of([(each, 0, some.blocks(len(each))) for each in ids], backend.device)
    every = model.forward(batch, some.ops)
    last_tokens = batch.cu_seqlens[1:].long() - 1
    last = model.forward(replace(batch, last_tokens=last_tokens), other.ops)
    assert_close(last, every[last_tokens].cpu(), backend)
    written = ~some.cache.isnan()
    assert torch.equal(written, ~other.cache.isnan()), "K and V of every token are written all the same"
    assert torch.allclose(some.cache[written], other.cache[written], atol=backend.p99_error)


@torch.inference_mode()
def test_a_sharded_checkpoint_loads_like_a_single_file(tmp_path: Path, checkpoint: Checkpoint) -> None:
    write_checkpoint("llama", tmp_path, shard_bytes="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    sharded, single = load(tmp_path), load(checkpoint("llama")[0])
    assert torch.equal(sharded.lm_head.data, single.lm_head.data)
    assert all(
        torch.equal(a.qkv.data, b.qkv.data) for (a, _), (b, _) in zip(sharded.layers, single.layers, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoints_load(dtype: torch.dtype, tmp_path: Path) -> None:
    write_checkpoint("qwen3-untied", tmp_path, dtype=dtype)
    model = load(tmp_path)
    assert model.embed.data.dtype == torch.float32
    assert read_config(tmp_path).dtype == str(dtype).removeprefix("torch.")
