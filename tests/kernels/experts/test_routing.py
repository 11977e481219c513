"""Choice of experts against its law, and pairs sorted by expert."""

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

from common.base.routing import Route, Score
from common.kernels.base.expert_operands import Choice, Routing
from common.kernels.experts.choice import choose_experts
from common.kernels.experts.grouping import group_pairs
from common.kernels.experts.router_logits import norm_logits, router_logits
from common.ops import reference
from common.ops.base import Router
from tests.kernels.conftest import AssertClose

HIDDEN = 200
CASES = [
    (5, 33, Route(3)),
    (1, 8, Route(3)),
    (70, 130, Route(3)),
    (5, 33, Route(4, renormalizes=False, scale=2.5)),
    (5, 33, Route(2, Score.SIGMOID, logit_scale=0.5)),
    (5, 33, Route(3, Score.SIGMOID, renormalizes=False)),
    (5, 33, Route(1)),
]
"""Tokens, experts, rules."""


def choice(rule: Route) -> Choice:
    return Choice(**asdict(rule))


def route(x: Tensor, weight: Tensor, rule: Choice, present: Tensor, **sizes: Any) -> Routing:
    return choose_experts(router_logits(x, weight), rule, present, **sizes)


def assert_law(x: Tensor, router: Router, present: Tensor, **changes: Any) -> None:
    sizes = {"num_experts": router.num_experts, "num_shared": router.num_shared} | changes
    found, wanted = route(x, router.weight, choice(router.route), present, **sizes), reference.route(x, router, present)
    same = found.experts == wanted.experts
    assert same.float().mean() > (0.999 if x.dtype == torch.float32 else 0.97), "but for nearly equal scores"
    assert torch.isfinite(found.weights).all()
    assert torch.allclose(found.weights[same], wanted.weights[same], rtol=1e-3, atol=1e-5)


def operands(m: int, n: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    present = torch.ones(m, dtype=torch.int32, device=device)
    present[m // 2 + 1 :: 3] = 0
    return torch.randn(m, HIDDEN).to(device, dtype), torch.randn(n, HIDDEN).to(device, dtype) * 0.2, present


@pytest.mark.parametrize(("num_tokens", "num_experts", "rule"), CASES)
def test_equals_the_law(
    num_tokens: int, num_experts: int, rule: Route, device: torch.device, dtype: torch.dtype
) -> None:
    x, weight, present = operands(num_tokens, num_experts, device, dtype)
    assert_law(x, Router(weight, rule, num_experts), present)


@pytest.mark.parametrize("num_shared", [1, 2])
@pytest.mark.parametrize("has_gate", [False, True])
def test_shared_experts_are_the_last(num_shared: int, has_gate: bool, device: torch.device, dtype: torch.dtype) -> None:
    x, weight, present = operands(6, 12 + has_gate, device, dtype)
    assert_law(x, Router(weight, Route(3), 12, num_shared), present)


def test_biases_and_factors(device: torch.device, dtype: torch.dtype) -> None:
    x, weight, present = operands(9, 12, device, dtype)
    bias, selection, scale = torch.rand(3, 12).to(device)
    router = Router(weight, Route(3, Score.SIGMOID), 12, bias=bias, selection_bias=selection, expert_scale=scale)
    assert_law(x, router, present, bias=bias, selection_bias=selection, expert_scale=scale)


def test_groups_of_experts_are_chosen_first(device: torch.device, dtype: torch.dtype) -> None:
    x, weight, present = operands(9, 12, device, dtype)
    rule = Route(4, Score.SIGMOID, groups=3, kept_groups=2, group_best=2)
    assert_law(x, Router(weight, rule, 12), present)


@pytest.mark.parametrize(("num_tokens", "hidden", "n"), [(1, 200, 9), (5, 33, 4), (8, 1100, 2)])
def test_norm_and_logits_at_once(
    num_tokens: int, hidden: int, n: int, device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    x, norm = torch.randn(num_tokens, hidden).to(device, dtype), torch.randn(hidden).to(device, dtype)
    weight = torch.randn(n, hidden).to(device, dtype)
    normed, logits = norm_logits(x, norm, 1e-5, weight)
    law = reference.rms_norm(x, norm, 1e-5)
    assert_close(normed, law)
    assert_close(logits.to(dtype), (law.float() @ weight.float().t()).to(dtype))


def test_among_equal_scores_the_lowest_numbers_are_chosen(device: torch.device, dtype: torch.dtype) -> None:
    x, weight = torch.ones(2, HIDDEN).to(device, dtype), torch.ones(20, HIDDEN).to(device, dtype)
    found = route(x, weight, choice(Route(5)), torch.ones(2, dtype=torch.int32, device=device), num_experts=20)
    assert found.experts.tolist() == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "tile"), [(1, 6, 16), (16, 40, 16), (60, 7, 16), (300, 9, 32), (1100, 6, 64)]
)
def test_pairs_are_sorted_by_expert_and_every_pair_is_in_a_tile(
    num_tokens: int, num_experts: int, tile: int, device: torch.device
) -> None:
    experts = torch.rand(num_tokens, num_experts).argsort(dim=1)[:, :5].int()
    experts[num_tokens // 2 + 1 :: 4] = -1
    groups = group_pairs(experts.to(device), num_experts, tile)
    flat, order = experts.flatten(), groups.order.cpu()
    classes = torch.where(flat < 0, num_experts, flat)
    assert torch.equal(order.long(), torch.sort(classes, stable=True).indices)
    covered: list[int] = []
    for expert, begin, end in groups.tiles.t().tolist():
        assert end - begin <= tile
        assert all(each == expert for each in flat[order[begin:end].long()])
        covered += range(begin, end)
    assert sorted(covered) == list(range(experts.numel()))
