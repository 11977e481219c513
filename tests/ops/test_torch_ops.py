"""The reference against torch's own attention, on ragged batches that are computed in chunks."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from common.kernels.base.attention_operands import AttentionWeights
from common.ops import reference
from common.ops.base import ForwardBatch, GroupCache, Norm, Residual, Weight
from common.ops.torch_ops import TorchOps
from tests.support.attention_weights import attention_weights

NUM_Q, NUM_KV, HEAD_DIM, BLOCK_SIZE = 6, 2, 32, 16
Chunks = list[tuple[int, int]]  # (begin, end) of each sequence's tokens in one step


def make_weights() -> AttentionWeights:
    return attention_weights(NUM_Q, NUM_KV, HEAD_DIM, 256, torch.device("cpu"), torch.float32)


def make_batch(chunks: Chunks, tables: Tensor) -> ForwardBatch:
    positions = torch.cat([torch.arange(begin, end) for begin, end in chunks])
    rows = torch.cat([torch.full((end - begin,), i) for i, (begin, end) in enumerate(chunks)])
    slots = tables[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    lengths = [end - begin for begin, end in chunks]
    return ForwardBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int32),
        positions=positions.int(),
        slots=(slots,),
        block_tables=(tables,),
        seq_lens=torch.tensor([end for _, end in chunks], dtype=torch.int32),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        last_tokens=torch.tensor(lengths).cumsum(0) - 1,
        max_query_len=max(lengths),
        max_seq_len=max(end for _, end in chunks),
    )


def contiguous_attention(qkv: Tensor, weights: AttentionWeights) -> Tensor:
    """Causal attention of one whole sequence by torch's kernel: `[num_tokens, q_heads * head_dim]`."""
    heads = qkv.view(qkv.shape[0], -1, HEAD_DIM)
    q, k, v = heads.split([NUM_Q, NUM_KV, NUM_KV], dim=1)
    assert weights.q_norm is not None and weights.k_norm is not None
    q = functional.rms_norm(q, (HEAD_DIM,), weights.q_norm, 1e-6)
    k = functional.rms_norm(k, (HEAD_DIM,), weights.k_norm, 1e-6)
    turns = torch.complex(*weights.rope[: qkv.shape[0]].chunk(2, dim=1)).unsqueeze(1)  # [num_tokens, 1, head_dim / 2]
    q, k = (torch.complex(*x.chunk(2, dim=-1)) * turns for x in (q, k))
    q, k = (torch.cat((x.real, x.imag), dim=-1) for x in (q, k))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


def test_chunked_paged_attention_equals_contiguous_attention() -> None:
    torch.manual_seed(7)
    weights = make_weights()
    lengths = [40, 1, 97, 16]
    qkvs = [torch.randn(n, (NUM_Q + 2 * NUM_KV) * HEAD_DIM) for n in lengths]
    pool = torch.full((40, 3, 2, BLOCK_SIZE, NUM_KV, HEAD_DIM), float("nan"))
    tables = torch.randperm(40)[:28].view(4, 7).int()
    ops = TorchOps([GroupCache(pool, NUM_Q)])
    steps: list[dict[int, tuple[int, int]]] = [
        {0: (0, 40), 2: (0, 30)},
        {1: (0, 1), 2: (30, 31), 3: (0, 15)},
        {2: (31, 97), 3: (15, 16)},
    ]
    outs: list[list[Tensor]] = [[] for _ in lengths]
    for step in steps:
        chunks = list(step.values())
        qkv = torch.cat([qkvs[i][begin:end] for i, (begin, end) in step.items()])
        out = ops.attention(qkv, weights, 1, make_batch(chunks, tables[list(step)]))
        for i, part in zip(step, out.split([end - begin for begin, end in chunks]), strict=True):
            outs[i].append(part)
    for parts, whole in zip(outs, qkvs, strict=True):
        torch.testing.assert_close(torch.cat(parts), contiguous_attention(whole, weights), rtol=1e-4, atol=1e-5)
    assert pool[:, 0].isnan().all() and pool[:, 2].isnan().all()  # other layers


def test_padding_rows_give_zeros_and_write_nothing() -> None:
    torch.manual_seed(8)
    pool = torch.full((4, 1, 2, BLOCK_SIZE, NUM_KV, HEAD_DIM), float("nan"))
    batch = ForwardBatch(
        token_ids=torch.zeros(2, dtype=torch.int32),
        positions=torch.zeros(2, dtype=torch.int32),
        slots=(torch.tensor([-1, 19]),),
        block_tables=(torch.tensor([[0], [1]], dtype=torch.int32),),
        seq_lens=torch.tensor([0, 1], dtype=torch.int32),
        cu_seqlens=torch.tensor([0, 1, 2], dtype=torch.int32),
        last_tokens=None,
        max_query_len=1,
        max_seq_len=1,
    )
    qkv = torch.randn(2, (NUM_Q + 2 * NUM_KV) * HEAD_DIM)
    TorchOps([GroupCache(pool, NUM_Q)]).attention(qkv, make_weights(), 0, batch)
    assert (~pool.isnan()).sum() == 2 * NUM_KV * HEAD_DIM
    assert not pool[1, 0, :, 3].isnan().any()


def test_linears_and_gate() -> None:
    torch.manual_seed(9)
    ops = TorchOps([GroupCache(torch.zeros(1, 1, 2, 16, 1, 32), 1)])
    x, norm, weight, residual = torch.randn(5, 8), torch.rand(8), torch.randn(12, 8), torch.randn(5, 12)
    normed = functional.rms_norm(x, (8,), norm, 1e-6)
    torch.testing.assert_close(ops.norm_linear(Residual(x), Norm(norm, 1e-6), Weight(weight)), normed @ weight.T)
    torch.testing.assert_close(ops.linear_add(x, Weight(weight), Residual(residual)).rows, residual + x @ weight.T)
    gate, up = (normed @ weight.T).chunk(2, dim=1)
    torch.testing.assert_close(
        ops.norm_gate_up(Residual(x), Norm(norm, 1e-6), Weight(weight)), functional.silu(gate) * up
    )


def test_logits_are_fp32() -> None:
    torch.manual_seed(10)
    ops = TorchOps([GroupCache(torch.zeros(1, 1, 2, 16, 1, 32), 1)])
    x, norm = torch.randn(9, 8).bfloat16(), torch.rand(8).bfloat16()
    weight = torch.randn(30, 8).bfloat16()
    logits = ops.logits(Residual(x), Norm(norm, 1e-6), Weight(weight))
    assert logits.dtype == torch.float32
    expected = functional.rms_norm(x.float(), (8,), norm.float(), 1e-6) @ weight.float().T
    torch.testing.assert_close(logits, expected, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("word", [0, 0xFFFFFFFF])
def test_noise_is_finite_at_the_ends_of_the_random_bits(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "philox", lambda *_: (torch.full((1, 3), word),) * 4)
    assert reference.gumbel(torch.tensor([1]), torch.tensor([1]), 3).isfinite().all()


def test_e4m3_keys_and_values_are_attended_as_stored_however_a_prompt_is_cut() -> None:
    """Of scales, also at both ends of what e4m3 holds, and of a number that it does not hold."""
    torch.manual_seed(8)
    weights = replace(make_weights(), k_scale=0.25, v_scale=3.0)
    length, e4m3 = 70, torch.float8_e4m3fn
    qkv = torch.randn(length, (NUM_Q + 2 * NUM_KV) * HEAD_DIM)
    qkv[5, -3:] = torch.tensor([1e4, -1e4, 1e-5])
    tables, outputs, pools = torch.randperm(8)[None, :5].int(), [], []
    for steps in ([(0, length)], [(0, 33), (33, 34), (34, length)]):
        pool = torch.zeros(8, 1, 2, BLOCK_SIZE, NUM_KV, HEAD_DIM, dtype=e4m3)
        ops = TorchOps([GroupCache(pool, NUM_Q)])
        chunks = [
            ops.attention(qkv[begin:end], weights, 0, ops.begin(make_batch([(begin, end)], tables)))
            for begin, end in steps
        ]
        outputs.append(torch.cat(chunks))
        pools.append(pool)
    assert torch.equal(pools[0].view(torch.uint8), pools[1].view(torch.uint8))
    torch.testing.assert_close(outputs[0], outputs[1])
    exact = torch.zeros(8, 1, 2, BLOCK_SIZE, NUM_KV, HEAD_DIM)
    plain = TorchOps([GroupCache(exact, NUM_Q)])
    batch = plain.begin(make_batch([(0, length)], tables))
    plain.attention(qkv, weights, 0, batch)
    k, v = exact[:, 0].unbind(1)
    k.copy_((k / 0.25).clamp(-448, 448).to(e4m3).float() * 0.25)
    v.copy_((v / 3.0).clamp(-448, 448).to(e4m3).float() * 3.0)
    assert v[tables[0, 0], 5, -1, -3:].tolist() == [1344.0, -1344.0, 0.0]
    q = reference.qk_norm_rope_kv(qkv, weights, batch.positions, -torch.ones_like(batch.slots[0]), k, v)
    law = reference.paged_attention(q, k, v, tables, batch, weights.scale).flatten(1)
    torch.testing.assert_close(outputs[0], law)
