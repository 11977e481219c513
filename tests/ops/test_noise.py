"""The noise that decides draws: right to a rounding error at both ends, without ties at the top."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from common.ops import reference

LAST = (1 << 32) - 1
NUM = 1 << 20


def edge_bits() -> Tensor:
    """Both ends, the middle, where an order of magnitude begins, and a few anywhere."""
    middle, powers = 1 << 31, 2 ** torch.arange(32)
    near = torch.arange(3000)
    anywhere = torch.randint(0, 1 << 32, (100_000,), generator=torch.Generator().manual_seed(3))
    return torch.cat((near, LAST - near, middle + near, middle - 1 - near, powers, powers - 1, LAST - powers, anywhere))


@pytest.fixture(scope="module")
def noise() -> Tensor:
    """Of so many tokens of two rows: `[2, NUM]`."""
    return reference.gumbel(torch.tensor([11, 12]), torch.tensor([5, 6]), NUM)


def exact_philox(c0: int, c1: int, k0: int, k1: int) -> tuple[int, int, int, int]:
    """Return the words of Philox 4x32-10 by integers without bounds."""
    c2 = c3 = 0
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & LAST, (a >> 32) ^ c3 ^ k1, a & LAST
        k0, k1 = (k0 + 0x9E3779B9) & LAST, (k1 + 0xBB67AE85) & LAST
    return c0, c1, c2, c3


def test_words_are_those_of_philox() -> None:
    assert exact_philox(0, 0, 0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8), "as its authors publish"
    cases = list(itertools.product((0, 1, 1 << 31, LAST, 0x9E3779B9), repeat=4))
    words = reference.philox(*torch.tensor(cases).unbind(1))
    assert torch.stack(words, dim=1).tolist() == [list(exact_philox(*case)) for case in cases]


def test_every_one_of_32_bits_counts_at_either_end() -> None:
    bits = edge_bits().sort().values
    ours = reference.exponential(bits)
    from_zero, from_one = (LAST - bits.double() + 0.5) / 2**32, (bits.double() + 0.5) / 2**32  # u, and 1 - u
    exact = torch.where(bits < 1 << 31, -torch.log1p(-from_one), -from_zero.log())
    assert ours.dtype == torch.float32 and ours.isfinite().all() and (ours > 0).all()
    assert ((ours - exact) / exact).abs().max() < 3e-7
    assert (ours.diff() >= 0).all(), "more bits, more of it"


@pytest.mark.medium
def test_the_largest_noise_is_one_tokens_alone(noise: Tensor) -> None:
    for row in noise:
        assert row.topk(500).values.unique().numel() == 500


def test_the_noise_is_gumbels_to_the_tails(noise: Tensor) -> None:
    values = noise.flatten().double()
    assert abs(values.mean() - 0.5772157) < 5 * math.pi / math.sqrt(6 * values.numel())
    for limit in (-2.6, -2.0, 0.0, 3.0, 6.0, 9.0, 11.0):
        share = math.exp(-math.exp(-limit))  # of what lies below
        spread = math.sqrt(values.numel() * share * (1 - share))
        assert abs((values < limit).sum() - values.numel() * share) < 5 * spread, f"too many or too few below {limit}"
