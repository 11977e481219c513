"""Every architecture against transformers: logits at every position, in one piece, in chunks and token by token."""

import copy
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
from common.models.loading.weights import Fill, Loading, WeightsLayout
from common.models.reading import architectures, read_config
from common.ops.base import ForwardBatch, GroupCache, Ops, Residual
from common.ops.torch_ops import TorchOps
from common.settings.config import KernelsSection
from tests.support.allocator import BlockAllocator
from tests.support.checkpoints import LIKE_OTHERS, VARIANTS, VOCAB, WRAPPED, wrap_checkpoint, write_checkpoint
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

    def ops(self, caches: list[GroupCache]) -> Ops:
        if self.device == "cpu":
            return TorchOps(caches)
        from common.ops.cuda_ops import CudaOps

        return CudaOps(caches, KernelsSection(), 16)


CPU = Backend("cpu", "float32", 1e-5, 1e-4)
BACKENDS = [
    pytest.param(CPU, id="cpu"),
    pytest.param(Backend("cuda:0", "float32", 1e-4, 1e-3), id="cuda-float32", marks=pytest.mark.gpu),
    pytest.param(Backend("cuda:0", "bfloat16", 3e-2, 1.5e-1), id="cuda-bfloat16", marks=pytest.mark.gpu),
    pytest.param(Backend("cuda:0", "float16", 5e-3, 3e-2), id="cuda-float16", marks=pytest.mark.gpu),
]


EACH = pytest.mark.parametrize(
    ("variant", "backend"),
    [
        pytest.param(variant, *backend.values, id=f"{variant}-{backend.id}", marks=backend.marks)
        for variant in VARIANTS
        for backend in BACKENDS
        if backend.id != "cuda-float16" or not variant.startswith("gemma")  # whose activations exceed float16
    ],
)


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
    """Poisoned pools of each group, and scattered blocks for each sequence."""

    def __init__(self, model: Decoder, backend: Backend = CPU, num_blocks: int = 100) -> None:
        self.groups = model.config.cache_groups(BLOCK_SIZE, backend.dtype)
        self.device = backend.device
        self.caches = [
            torch.full((num_blocks, *group.block_shape), torch.nan, dtype=DTYPES[group.dtype], device=self.device)
            for group in self.groups
        ]
        self.allocators = [allocator_of(num_blocks - 1) for _ in self.groups]
        groups = zip(self.caches, model.config.q_heads, self.groups, strict=True)
        self.ops = backend.ops([GroupCache(cache, num_q_heads, group.window) for cache, num_q_heads, group in groups])

    def blocks(self, num_tokens: int) -> list[list[int]]:
        """Blocks by group."""
        return [
            self._blocks(allocator, group.num_places(num_tokens))
            for allocator, group in zip(self.allocators, self.groups, strict=True)
        ]

    def batch(self, chunks: list[tuple[list[int], int, list[list[int]]]]) -> ForwardBatch:
        """Of (token ids, start, blocks by group) of each sequence; logits of every token."""
        lengths = [len(ids) for ids, _, _ in chunks]
        positions = torch.cat([torch.arange(start, start + len(ids)) for ids, start, _ in chunks])
        rows = torch.repeat_interleave(torch.arange(len(chunks)), torch.tensor(lengths))
        tables, slots = [], []
        for number, group in enumerate(self.groups):
            table = torch.zeros(len(chunks), max(len(blocks[number]) for _, _, blocks in chunks), dtype=torch.int32)
            for row, (_, _, blocks) in zip(table, chunks, strict=True):
                row[: len(blocks[number])] = torch.tensor(blocks[number])
            tables.append(table.to(self.device))
            places = positions // group.block_size if group.grows else torch.zeros_like(positions)
            slots.append(table[rows, places].long() * group.block_size + positions % group.block_size)
        seq_lens = [start + length for (_, start, _), length in zip(chunks, lengths, strict=True)]
        return ForwardBatch(
            token_ids=torch.tensor([i for ids, _, _ in chunks for i in ids], dtype=torch.int32, device=self.device),
            positions=positions.int().to(self.device),
            slots=tuple(each.to(self.device) for each in slots),
            block_tables=tuple(tables),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=self.device),
            cu_seqlens=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=self.device),
            last_tokens=None,
            max_query_len=max(lengths),
            max_seq_len=max(seq_lens),
        )

    @staticmethod
    def _blocks(allocator: BlockAllocator, wanted: int) -> list[int]:
        taken = take(allocator, 2 * wanted)
        allocator.free(taken[1::2])
        return taken[::2]


def assert_close(
    ours: torch.Tensor, theirs: torch.Tensor, backend: Backend = CPU, *, rounded: torch.Tensor | None = None
) -> None:
    """Some models amplify rounding; `float32` shows whether the computation is right.

    Args:
        rounded: logits of transformers in the backend's dtype, whose errors may be larger than usual.
    """
    mean, p99 = errors(ours, theirs)
    mean_limit, p99_limit = backend.mean_error, backend.p99_error
    if rounded is not None:
        usual_mean, usual_p99 = errors(rounded, theirs)
        mean_limit, p99_limit = max(mean_limit, 3.0 * usual_mean), max(p99_limit, 3.0 * usual_p99)
    assert mean < mean_limit
    assert p99 < p99_limit


def errors(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[float, float]:
    """Return the mean error and its 99th percentile, as shares of the mean logit."""
    error = (ours.cpu().float() - theirs).abs() / theirs.abs().mean()
    return error.mean().item(), error.flatten().quantile(0.99).item()


def rounded_logits(theirs: Any, backend: Backend, sequences: list[list[int]]) -> torch.Tensor | None:
    """Return logits of transformers in 16 bits; None for a backend in fp32."""
    if backend.dtype == "float32":
        return None
    model = copy.deepcopy(theirs).to(DTYPES[backend.dtype])
    return torch.cat([model(torch.tensor([ids])).logits[0] for ids in sequences])


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


def test_every_architecture_is_covered() -> None:
    assert {model_type for model_type, _ in VARIANTS.values()} | {*WRAPPED, *LIKE_OTHERS} == set(architectures())


def test_every_architecture_is_documented() -> None:
    page = Path("docs/models.md").read_text(encoding="utf-8")
    assert [name for name in architectures() if f"`{name}`" not in page] == []


@EACH
@torch.inference_mode()
def test_logits_equal_transformers_at_every_position(variant: str, backend: Backend, checkpoint: Checkpoint) -> None:
    directory, theirs = checkpoint(variant)
    model = load(directory, backend)
    cache = Cache(model, backend)
    ragged = prompts(1, 37, 200)
    batch = cache.batch([(ids, 0, cache.blocks(len(ids))) for ids in ragged])
    ours = model.forward(batch, cache.ops)
    expected = torch.cat([theirs(torch.tensor([ids])).logits[0] for ids in ragged])
    assert_close(ours, expected, backend, rounded=rounded_logits(theirs, backend, ragged))


@EACH
@torch.inference_mode()
def test_chunks_of_any_size_give_the_same_logits(variant: str, backend: Backend, checkpoint: Checkpoint) -> None:
    directory, theirs = checkpoint(variant)
    model = load(directory, backend)
    cache = Cache(model, backend)
    [ids] = prompts(150)
    blocks = cache.blocks(150)
    bounds = [0, 1, 17, 64, *range(140, 151)]
    logits = [
        model.forward(cache.batch([(ids[begin:end], begin, blocks)]), cache.ops)
        for begin, end in itertools.pairwise(bounds)
    ]
    rounded = rounded_logits(theirs, backend, [ids])
    assert_close(torch.cat(logits), theirs(torch.tensor([ids])).logits[0], backend, rounded=rounded)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", ["qwen3-tied", "qwen3.5", "gemma3", "gemma4", "gemma4-experts", "deepseek-v2"])
@torch.inference_mode()
def test_logits_of_last_tokens_alone_are_theirs_among_all(
    variant: str, backend: Backend, checkpoint: Checkpoint
) -> None:
    model = load(checkpoint(variant)[0], backend)
    some, other = Cache(model, backend), Cache(model, backend)
    ids = prompts(20, 1, 90)
    batch = some.batch([(each, 0, some.blocks(len(each))) for each in ids])
    every = model.forward(batch, some.ops)
    last_tokens = batch.cu_seqlens[1:].long() - 1
    last = model.forward(replace(batch, last_tokens=last_tokens), other.ops)
    assert_close(last, every[last_tokens].cpu(), backend)
    for ours, theirs in zip(some.caches, other.caches, strict=True):
        written = ~ours.isnan()
        assert torch.equal(written, ~theirs.isnan()), "the cache of every token is written all the same"
        assert torch.allclose(ours[written], theirs[written], atol=backend.p99_error)


@torch.inference_mode()
def test_a_sharded_checkpoint_loads_like_a_single_file(tmp_path: Path, checkpoint: Checkpoint) -> None:
    write_checkpoint("llama", tmp_path, shard_bytes="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_equal_weights(load(tmp_path), load(checkpoint("llama")[0]))


@pytest.mark.parametrize(
    ("model_type", "variant", "prefix"),
    [
        ("qwen3_5", "qwen3.5", "model.language_model."),
        ("qwen3_5_moe", "qwen3.5-moe", "model.language_model."),
        ("mistral3", "mistral", "language_model.model."),
        ("mistral3", "mistral4", "language_model.model."),
        ("gemma3", "gemma3", "model.language_model."),
        ("gemma3", "gemma3", "language_model.model."),
        ("gemma4", "gemma4", "model.language_model."),
        ("kimi_k25", "deepseek-v3", "language_model.model."),
        ("gemma4_unified", "gemma4-unified", "model.language_model."),
    ],
)
@torch.inference_mode()
def test_a_text_model_inside_another_loads_like_it_alone(
    model_type: str, variant: str, prefix: str, tmp_path: Path, checkpoint: Checkpoint
) -> None:
    alone = checkpoint(variant)[0]
    wrap_checkpoint(alone, tmp_path, model_type, prefix)
    assert_equal_weights(load(tmp_path), load(alone))


def assert_equal_weights(ours: Decoder, theirs: Decoder) -> None:
    assert torch.equal(ours.lm_head.data, theirs.lm_head.data)
    hidden, ops = ours.config.hidden_size, TorchOps([])
    for (mixer, mlp), (their_mixer, their_mlp) in zip(ours.layers, theirs.layers, strict=True):
        for x in (torch.ones(1, hidden), torch.arange(hidden).float()[None]):
            assert torch.equal(mixer.first_product(ops, Residual(x)), their_mixer.first_product(ops, Residual(x)))
        some, present = Residual(torch.randn(40, hidden)), torch.ones(40)
        assert torch.equal(mlp.forward(some, ops, present).rows, their_mlp.forward(some, ops, present).rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoints_load(dtype: torch.dtype, tmp_path: Path) -> None:
    write_checkpoint("qwen3-untied", tmp_path, dtype=dtype)
    model = load(tmp_path)
    assert model.embed.data.dtype == torch.float32
    assert read_config(tmp_path).dtype == str(dtype).removeprefix("torch.")
