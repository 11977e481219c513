"""Rotation, absorption and the write of latents against the reference; nothing else in the cache is touched."""

import pytest
import torch

from common.kernels.latent.inputs import absorb_new_queries, absorb_queries, rotate_latent_queries
from common.kernels.latent.values import latent_values
from common.ops import reference
from tests.kernels.conftest import AssertClose
from tests.support.latents import Dims, latent_weights

SHAPES = [
    pytest.param(1, Dims(), False, id="a-token"),
    pytest.param(37, Dims(3, 64, 16, 16, 32), True, id="odd-heads"),
    pytest.param(5, Dims(2, 128, 64, 32, 64), False, id="wider"),
]


def draw(
    num_tokens: int, dims: Dims, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q and kv, cut from wider rows, positions, slots with padding, and a poisoned cache."""
    width = dims.num_heads * (dims.nope + dims.rope)
    rows = torch.randn(num_tokens, width + dims.rank + dims.rope).to(device, dtype)
    slots = torch.randperm(5 * 8)[:num_tokens] if num_tokens <= 40 else torch.arange(num_tokens)
    positions = torch.randint(0, 100, (num_tokens,), dtype=torch.int32)
    if num_tokens > 2:
        slots[1], positions[1] = -1, 1 << 29
    cache = torch.full((5, 3, 8, dims.rank + dims.rope), torch.nan, dtype=dtype, device=device)[:, 1]
    return rows[:, :width], rows[:, width:], positions.to(device), slots.to(device), cache


@pytest.mark.parametrize(("num_tokens", "dims", "has_factors"), SHAPES)
@pytest.mark.parametrize("absorbs", [True, False])
def test_equals_reference(
    num_tokens: int,
    dims: Dims,
    has_factors: bool,
    absorbs: bool,
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
) -> None:
    weights = latent_weights(dims, 100, device, dtype, has_factors=has_factors)
    q, kv, positions, slots, cache = draw(num_tokens, dims, device, dtype)
    expected_cache = cache.clone()
    kept = slots >= 0
    reference.write_latents(kv[kept], weights, positions[kept], slots[kept], expected_cache)
    expected = reference.rotated_queries(q[kept], weights, positions[kept])
    if absorbs:
        out = absorb_new_queries(q, kv, weights, positions, slots, cache)[kept]
        turned = expected[..., dims.nope :]
        expected = torch.cat((reference.absorbed_queries(expected, weights).to(dtype), turned), dim=-1)
    else:
        out = rotate_latent_queries(q, kv, weights, positions, slots, cache)[kept]
    assert_close(out, expected)
    written = ~expected_cache.isnan()
    assert torch.equal(written, ~cache.isnan())
    assert_close(cache[written], expected_cache[written])


def test_queries_rotated_before_are_absorbed_alike(
    device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    dims = Dims(3, 64, 32, 16, 16)
    weights = latent_weights(dims, 100, device, dtype, has_factors=True)
    q = torch.randn(19, 3, 48).to(device, dtype)
    expected = torch.cat((reference.absorbed_queries(q, weights).to(dtype), q[..., 32:]), dim=-1)
    assert_close(absorb_queries(q.flatten(1), weights), expected)


@pytest.mark.parametrize("dims", [Dims(), Dims(3, 128, 16, 16, 64)])
@pytest.mark.parametrize("num_tokens", [1, 35])
def test_values(
    num_tokens: int, dims: Dims, device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    weights = latent_weights(dims, 1, device, dtype)
    x = torch.randn(num_tokens, dims.num_heads, dims.rank).to(device, dtype)
    expected = torch.einsum("thr,hdr->thd", x.float(), weights.values.float()).to(dtype)
    assert_close(latent_values(x, weights), expected)
