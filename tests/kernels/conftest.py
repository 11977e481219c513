"""Kernels run compiled on a GPU where there is one, and in Triton's interpreter (CPU, fp32) where there is none.

Everything that a kernel must not read is NaN or an impossible id, and so is all memory it is to write.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import pytest
import torch
from torch import Tensor

from common.kernels.base.attention_operands import PromptOperands
from common.kernels.base.gpu import Gpu, gpu_of
from common.ops import reference
from common.ops.base import ForwardBatch
from tests.support.interpreter import hasten

hasten()

# (relative error of the whole, largest error relative to the largest value)
TOLERANCE = {torch.float32: (1e-5, 2e-5), torch.float16: (1.5e-3, 4e-3), torch.bfloat16: (8e-3, 2e-2)}
ANY_BLOCK = 1 << 30  # in block tables past the last block: reading there fails or gives NaN
AttentionCase = tuple[list[int], list[int], int, int, int, int]
"""query_lens, seq_lens, block_size, num_q, num_kv, head_dim"""
AssertClose = Callable[[Tensor, Tensor], None]


class MakePaged(Protocol):
    """Makes a pool and a batch; what is out of sight of a window must not be read."""

    def __call__(
        self, query_lens: list[int], seq_lens: list[int], block_size: int, num_kv: int, head_dim: int, window: int = 0
    ) -> tuple[Tensor, ForwardBatch]: ...


class MakeAttention(Protocol):
    """Makes queries, a pool and a batch."""

    def __call__(
        self,
        query_lens: list[int],
        seq_lens: list[int],
        block_size: int,
        num_q: int,
        num_kv: int,
        head_dim: int,
        window: int = 0,
    ) -> tuple[Tensor, Tensor, ForwardBatch]: ...


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all cases of a test but its first `medium`: an interpreter runs them, and `make check` needs one of each."""
    seen: set[str] = set()
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("gpu"):
            test = item.nodeid.partition("[")[0]
            if test in seen:
                item.add_marker(pytest.mark.medium)
            seen.add(test)


@pytest.fixture(
    params=[
        pytest.param(("cpu", torch.float32), id="interpreter-fp32"),
        pytest.param(("cuda", torch.float32), id="cuda-fp32", marks=pytest.mark.gpu),
        pytest.param(("cuda", torch.float16), id="cuda-fp16", marks=pytest.mark.gpu),
        pytest.param(("cuda", torch.bfloat16), id="cuda-bf16", marks=pytest.mark.gpu),
    ]
)
def target(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    device, dtype = request.param
    if (device == "cuda") != torch.cuda.is_available():
        pytest.skip("needs a GPU" if device == "cuda" else "the GPU runs these tests compiled")
    return device, dtype


@pytest.fixture
def device(target: tuple[str, torch.dtype]) -> torch.device:
    return torch.device(target[0])


@pytest.fixture
def dtype(target: tuple[str, torch.dtype]) -> torch.dtype:
    return target[1]


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device("cuda")


@pytest.fixture
def hopper(cuda: torch.device) -> torch.device:
    if not gpu_of(cuda).is_hopper:
        pytest.skip("needs a Hopper GPU")
    return cuda


@pytest.fixture(
    params=[torch.uint8, pytest.param(torch.float8_e4m3fn, marks=pytest.mark.gpu)], ids=["bytes", "numbers"]
)
def cache(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    """Type of a cache of e4m3 numbers: bytes whose bits are moved, or numbers that a GPU has instructions for."""
    of_numbers = request.param != torch.uint8
    if of_numbers and (device.type == "cpu" or gpu_of(device).capability < (8, 9)):
        pytest.skip("needs a GPU with instructions for e4m3")
    return cast(torch.dtype, request.param)


def gpu_at(device: torch.device) -> Gpu:
    """What launchers size their tiles for; for the interpreter, which has no limits, a GPU with the least memory."""
    return gpu_of(device) if device.type == "cuda" else Gpu("interpreter", (8, 6), 4, 99 << 10)


@pytest.fixture(autouse=True)
def _seed_and_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory from `torch.empty` and `torch.empty_like` is NaN, or -1 in integers."""
    torch.manual_seed(20)

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapper(*args: object, **kwargs: object) -> Tensor:
            out = allocate(*args, **kwargs)
            return out.fill_(float("nan") if out.is_floating_point() else -1)

        return wrapper

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


@pytest.fixture
def assert_close() -> AssertClose:
    """Compare a kernel's output with the reference's, by bounds that suit the dtype; NaN fails."""

    def check(out: Tensor, ref: Tensor) -> None:
        assert out.shape == ref.shape and out.dtype == ref.dtype
        whole, largest = TOLERANCE[out.dtype]
        out, ref = out.float(), ref.float()
        assert torch.isfinite(out).all()
        assert (out - ref).norm() <= whole * ref.norm()
        assert (out - ref).abs().max() <= largest * ref.abs().max()

    return check


@pytest.fixture
def make_paged(device: torch.device, dtype: torch.dtype) -> MakePaged:
    return partial(_make_paged, device, dtype)


@pytest.fixture
def make_attention(make_paged: MakePaged) -> MakeAttention:
    """The same with queries of `num_q` heads: an `AttentionCase` made."""

    def make(
        query_lens: list[int],
        seq_lens: list[int],
        block_size: int,
        num_q: int,
        num_kv: int,
        head_dim: int,
        window: int = 0,
    ) -> tuple[Tensor, Tensor, ForwardBatch]:
        pool, batch = make_paged(query_lens, seq_lens, block_size, num_kv, head_dim, window)
        return torch.randn(sum(query_lens), num_q, head_dim).to(pool), pool, batch

    return make


def random_sinks(num_q: int, device: torch.device) -> Tensor:
    """Scores of no token, now below those of the keys, now above."""
    return (torch.randn(num_q) * 3).to(device)


def prompts_of(
    q: Tensor,
    pool: Tensor,
    batch: ForwardBatch,
    scale: float | None,
    *,
    window: int,
    sinks: Tensor | None,
    v_scale: float,
) -> PromptOperands:
    """Operands over layer 1 of the pool."""
    return PromptOperands(
        q=q,
        k_cache=pool[:, 1, 0],
        v_cache=pool[:, 1, 1],
        block_tables=batch.block_tables[0],
        cu_seqlens=batch.cu_seqlens,
        seq_lens=batch.seq_lens,
        scale=scale or q.shape[2] ** -0.5,
        window=window,
        sinks=sinks,
        v_scale=v_scale,
    )


def expected_attention(
    q: Tensor,
    pool: Tensor,
    batch: ForwardBatch,
    scale: float | None = None,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Over layer 1 of the pool, by the reference."""
    k, v = pool[:, 1].unbind(1)
    scale = scale or q.shape[2] ** -0.5
    return reference.paged_attention(q, k, v, batch.block_tables[0], batch, scale, window, sinks)


def _make_paged(
    device: torch.device,
    dtype: torch.dtype,
    query_lens: list[int],
    seq_lens: list[int],
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    window: int = 0,
) -> tuple[Tensor, ForwardBatch]:
    """A pool `[num_blocks, 2 layers, k|v, block_size, num_kv_heads, head_dim]` whose layer 1 holds the sequences.

    Blocks are scattered; every other block, layer and token is NaN, and so is every token out of sight.
    """
    num_blocks_of = [-(-n // block_size) for n in seq_lens]
    num_blocks = sum(num_blocks_of) + 3
    pool = torch.full((num_blocks, 2, 2, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype)
    free = torch.randperm(num_blocks).tolist()
    tables = torch.full((len(seq_lens), max(num_blocks_of) + 2), ANY_BLOCK, dtype=torch.int32)
    slots: list[int] = []
    positions: list[int] = []
    for i, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        blocks = [free.pop() for _ in range(num_blocks_of[i])]
        tables[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        own = [blocks[p // block_size] * block_size + p % block_size for p in range(seq_len)]
        seen = max(seq_len - query_len + 1 - window, 0) if window else 0
        tables[i, : seen // block_size] = ANY_BLOCK
        for slot in own[seen:]:
            pool[slot // block_size, 1, :, slot % block_size] = torch.randn(2, num_kv_heads, head_dim)
        slots += own[seq_len - query_len :] if seq_len else [-1] * query_len
        positions += range(seq_len - query_len, seq_len) if seq_len else [1 << 29] * query_len
    batch = ForwardBatch(
        token_ids=torch.zeros(len(slots), dtype=torch.int32, device=device),
        positions=torch.tensor(positions, dtype=torch.int32, device=device),
        slots=(torch.tensor(slots, dtype=torch.int64, device=device),),
        block_tables=(tables.to(device),),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        cu_seqlens=torch.tensor([0, *query_lens]).cumsum(0).int().to(device),
        last_tokens=None,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )
    return pool.to(device), batch
