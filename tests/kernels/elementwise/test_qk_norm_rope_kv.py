"""Norms, rotation and cache write against the reference; nothing but the named slots is written."""

from dataclasses import replace

import pytest
import torch

from common.kernels.elementwise.qk_norm_rope_kv import heads_per_program, qk_norm_rope_kv
from common.ops import reference
from tests.kernels.conftest import AssertClose
from tests.support.attention_weights import attention_weights

MAX_POSITIONS = 500


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"has_norm": False},
        {"has_norm": False, "has_bias": True},
        {"has_bias": True, "norms_values": True},
        {"has_bias": True, "norms_values": True, "shares_kv": True},
        {"has_norm": False, "shares_kv": True, "has_factors": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("num_tokens", "num_q", "num_kv", "head_dim", "block_size"),
    [
        (1, 32, 8, 128, 16),
        (5, 4, 2, 32, 16),
        (33, 6, 2, 64, 32),
        (40, 3, 1, 64, 64),
        (35, 8, 4, 128, 16),
        (33, 8, 8, 512, 16),
    ],
)
def test_equals_reference(
    num_tokens: int,
    num_q: int,
    num_kv: int,
    head_dim: int,
    block_size: int,
    given: dict[str, bool],
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
) -> None:
    weights = attention_weights(num_q, num_kv, head_dim, MAX_POSITIONS, device, dtype, **given)
    qkv = torch.randn(num_tokens, weights.num_heads * head_dim).to(device, dtype)
    positions = torch.randint(0, MAX_POSITIONS, (num_tokens,), dtype=torch.int32).to(device)
    num_blocks = num_tokens // block_size + 3
    slots = torch.randperm(num_blocks * block_size)[:num_tokens].to(device)
    slots[num_tokens // 2 + 1 :: 3] = -1
    pools = [torch.full((num_blocks, 3, 2, block_size, num_kv, head_dim), float("nan")) for _ in range(2)]
    ours, theirs = (pool.to(device, dtype) for pool in pools)

    q = qk_norm_rope_kv(qkv, weights, positions, slots, ours[:, 1, 0], ours[:, 1, 1])
    expected = reference.qk_norm_rope_kv(qkv, weights, positions, slots, theirs[:, 1, 0], theirs[:, 1, 1])

    kept = slots >= 0
    assert_close(q[kept], expected[kept])
    assert torch.isfinite(q).all()
    written = ~theirs.isnan()
    assert torch.equal(~ours.isnan(), written)
    assert_close(ours[written], theirs[written])


def test_a_position_of_padding_is_never_looked_up(device: torch.device, dtype: torch.dtype) -> None:
    weights = attention_weights(2, 1, 32, MAX_POSITIONS, device, dtype)
    qkv = torch.randn(2, 4 * 32).to(device, dtype)
    positions = torch.tensor([1 << 30, -7], dtype=torch.int32, device=device)
    slots = torch.full((2,), -1, dtype=torch.int64, device=device)
    pool = torch.full((2, 1, 2, 16, 1, 32), float("nan")).to(device, dtype)
    q = qk_norm_rope_kv(qkv, weights, positions, slots, pool[:, 0, 0], pool[:, 0, 1])
    assert torch.isfinite(q).all()
    assert pool.isnan().all()


@pytest.mark.parametrize(
    ("num_tokens", "num_q", "num_kv", "heads"), [(1, 32, 8, 1), (64, 32, 8, 8), (64, 14, 2, 2), (64, 12, 3, 1)]
)
def test_tiles_never_straddle_q_k_and_v(num_tokens: int, num_q: int, num_kv: int, heads: int) -> None:
    assert heads_per_program(num_tokens, num_q, num_kv) == heads
    assert num_q % heads == 0 and num_kv % heads == 0


@pytest.mark.filterwarnings("ignore:.*encountered in")  # infinity by 0, in dimensions not looked at
@pytest.mark.parametrize(("k_scale", "v_scale"), [(1.0, 1.0), (0.37, 5.0)])
def test_every_bfloat16_number_becomes_the_e4m3_number_of_torch(
    k_scale: float, v_scale: float, cache: torch.dtype, device: torch.device, dtype: torch.dtype
) -> None:
    """Those beyond the largest become the largest, and NaN stays NaN; keys are rotated by no angle."""
    if dtype == torch.float16:
        pytest.skip("has other numbers")
    num_tokens, num_kv, head_dim = 32, 8, 512
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    weights = attention_weights(num_kv, num_kv, head_dim, num_tokens, device, dtype, has_norm=False)
    weights.rope.copy_(torch.tensor([1.0, 0.0], device=device).repeat_interleave(head_dim // 2))
    weights = replace(weights, k_scale=k_scale, v_scale=v_scale)
    q = torch.zeros(num_tokens, num_kv, head_dim)
    k = torch.cat((every.view(num_tokens, num_kv, head_dim // 2), q[..., head_dim // 2 :]), dim=-1)
    v = every.repeat(2).view(num_tokens, num_kv, head_dim)
    qkv = torch.cat((q, k, v), dim=1).flatten(1).to(device, dtype)
    slots = torch.arange(num_tokens, device=device)
    pool = torch.full((2, 2, num_tokens, num_kv, head_dim), 0x55, dtype=torch.uint8, device=device)
    qk_norm_rope_kv(qkv, weights, slots.int(), slots, *pool.view(cache).unbind(1))
    assert (pool[1] == 0x55).all()
    stored = pool[0].cpu().view(torch.float8_e4m3fn).float()
    keys, values = stored[0, ..., : head_dim // 2], stored[1]
    for ours, given, scale in ((keys, every.view_as(keys), k_scale), (values, v, v_scale)):
        expected = (given * (1.0 / scale)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()
        assert torch.equal(ours.isnan(), given.isnan())
        assert torch.equal(ours.nan_to_num(), expected.nan_to_num())
        assert torch.equal(ours.signbit()[~given.isnan()], given.signbit()[~given.isnan()])
