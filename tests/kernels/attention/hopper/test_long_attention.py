"""Attention of long prompt steps against the reference; what it runs on is a Hopper GPU."""

import pytest
import torch
from torch import Tensor

from common.device.engine.gpu_share import make_share
from common.kernels.attention.hopper.long_attention import long_attention
from common.ops.base import ForwardBatch
from tests.kernels.conftest import AssertClose, MakeAttention, expected_attention, prompts_of, random_sinks
from tests.support.attention_shapes import GATHERED, Seeing

QUERY_LENS, SEQ_LENS = [700, 129, 1, 300], [700, 1001, 513, 300]


def attend(
    q: Tensor,
    pool: Tensor,
    batch: ForwardBatch,
    num_keys: int | None = None,
    scale: float | None = None,
    window: int = 0,
    sinks: Tensor | None = None,
    v_scale: float = 1.0,
) -> Tensor:
    num_keys = int(batch.seq_lens.sum()) if num_keys is None else num_keys
    prompts = prompts_of(q, pool, batch, scale, window=window, sinks=sinks, v_scale=v_scale)
    return long_attention(prompts, num_keys)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lens",
    [
        ([1], [1], 16),
        ([64], [128], 16),
        ([65], [129], 16),  # a query and a key past a tile
        ([128, 128], [128, 256], 32),
        ([3, 64, 131], [130, 64, 195], 16),
        ([5, 40, 1, 200], [5, 70, 650, 463], 16),  # whole prompts, chunks with a prior context, one token
        (QUERY_LENS, SEQ_LENS, 16),
        (QUERY_LENS, SEQ_LENS, 32),
        (QUERY_LENS, SEQ_LENS, 64),
        ([17] * 70, [40] * 70, 16),  # query tiles that no sequence needs
        ([1500], [1937], 16),  # every slot is filled many times; of 16 heads, more items than programs
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "heads", [(2, 2, 64), (16, 2, 64), (3, 3, 128), (4, 2, 128), (8, 2, 128), (8, 4, 256)], ids=str
)
def test_equals_reference(
    lens: tuple[list[int], list[int], int],
    heads: tuple[int, int, int],
    make_attention: MakeAttention,
    assert_close: AssertClose,
) -> None:
    q, pool, batch = make_attention(*lens, *heads)
    assert_close(attend(q, pool, batch), expected_attention(q, pool, batch))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "seeing", [*GATHERED, Seeing(4, 2, 128, 1), Seeing(8, 2, 64, 700), Seeing(2, 1, 256, 64, has_sinks=True)], ids=str
)
@pytest.mark.parametrize(
    "lens",
    [
        (QUERY_LENS, SEQ_LENS),
        ([1500], [7937]),
        ([5, 40, 0, 300], [5, 5070, 0, 9063]),
        ([128, 129, 64], [128, 1281, 64]),
    ],
    ids=str,
)
def test_windows_and_sinks(
    lens: tuple[list[int], list[int]], seeing: Seeing, make_attention: MakeAttention, assert_close: AssertClose
) -> None:
    num_q, _, _, window, has_sinks = seeing
    q, pool, batch = make_attention(*lens, 16, *seeing[:4])
    sinks = random_sinks(num_q, q.device) if has_sinks else None
    out = attend(q, pool, batch, window=window, sinks=sinks)
    assert_close(out, expected_attention(q, pool, batch, window=window, sinks=sinks))


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_large_scores_do_not_overflow(scale: float, make_attention: MakeAttention, assert_close: AssertClose) -> None:
    q, pool, batch = make_attention([20, 300], [75, 300], 16, 2, 1, 64)
    q *= 30
    assert_close(attend(q, pool, batch, scale=scale), expected_attention(q, pool, batch, scale))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("bad_seq", range(4))
def test_bad_numbers_stay_in_their_sequence(bad_seq: int, bad: float, make_attention: MakeAttention) -> None:
    q, pool, batch = make_attention(QUERY_LENS, SEQ_LENS, 16, 8, 2, 128)
    before = attend(q, pool, batch)
    begin, end = batch.cu_seqlens[bad_seq : bad_seq + 2].tolist()
    blocks = batch.block_tables[0][bad_seq, : -(-SEQ_LENS[bad_seq] // 16)].long()
    pool[blocks] = bad
    q[begin:end] = bad
    after = attend(q, pool, batch)
    assert not torch.isfinite(after[begin:end]).any()
    assert torch.equal(after[:begin], before[:begin]) and torch.equal(after[end:], before[end:])


@pytest.mark.gpu
def test_the_same_bits_every_time(make_attention: MakeAttention) -> None:
    q, pool, batch = make_attention([1500, 700], [1937, 700], 16, 8, 2, 128)
    first = attend(q, pool, batch)
    for _ in range(50):
        assert torch.equal(attend(q, pool, batch), first)


@pytest.mark.gpu
def test_the_same_bits_on_a_share_of_the_gpu(make_attention: MakeAttention) -> None:
    """Few programs run at once there: they take all items, and the others start when none is left."""
    share = make_share(1, torch.device("cuda", torch.cuda.current_device()))
    if share.limited is None:
        pytest.skip("this GPU cannot be divided")
    q, pool, batch = make_attention([1500, 700], [1937, 700], 16, 16, 2, 128)
    on_all = attend(q, pool, batch)
    with share.stream(whole=False):
        on_few = attend(q, pool, batch)
    torch.cuda.synchronize()
    assert torch.equal(on_few, on_all)


@pytest.mark.gpu
def test_in_a_captured_graph(make_attention: MakeAttention, assert_close: AssertClose) -> None:
    """A replay sees the inputs of its time, other lengths included; the host knew only a bound of them."""
    q, pool, batch = make_attention(QUERY_LENS, SEQ_LENS, 16, 8, 2, 128)
    num_keys = sum(SEQ_LENS)
    attend(q, pool, batch, num_keys)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, pool, batch, num_keys)
    q.normal_()
    batch.cu_seqlens.copy_(torch.tensor([0, 300, 429, 430, 700]))
    batch.seq_lens.copy_(torch.tensor([650, 999, 2, 300]))
    out.fill_(float("nan"))
    graph.replay()
    assert_close(out[:700], expected_attention(q[:700], pool, batch))
