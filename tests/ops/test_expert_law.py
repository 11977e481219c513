"""The law of experts: which experts a token chooses, with what weights, and what its experts make of it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from common.base.activation import Activation
from common.base.routing import Route, Score
from common.ops import reference
from common.ops.base import ExpertWeights, Router, Routing

HIDDEN, INNER, NUM = 24, 12, 8


def make_router(route: Route, **changes: object) -> Router:
    torch.manual_seed(1)
    return replace(Router(torch.randn(NUM, HIDDEN), route, NUM), **changes)  # type: ignore[arg-type]


def tokens(count: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, HIDDEN, generator=generator), torch.ones(count, dtype=torch.int32)


def make_weights(num: int = NUM, activation: Activation = Activation.SILU) -> ExpertWeights:
    torch.manual_seed(3)
    return ExpertWeights(torch.randn(num, 2 * INNER, HIDDEN), torch.randn(num, HIDDEN, INNER), activation)


SCORES: dict[Score, Callable[[Tensor], Tensor]] = {
    Score.SOFTMAX: lambda logits: logits.exp() / logits.exp().sum(-1, keepdim=True),
    Score.SIGMOID: lambda logits: 1.0 / (1.0 + (-logits).exp()),
}


@pytest.mark.parametrize("score", Score)
@pytest.mark.parametrize("renormalizes", [False, True])
def test_weights_are_scores_of_the_best(score: Score, renormalizes: bool) -> None:
    router = make_router(Route(3, score, renormalizes, scale=2.5, logit_scale=0.5))
    x, present = tokens()
    found = reference.route(x, router, present)
    scores = SCORES[score](0.5 * x @ router.weight.t())
    best = scores.topk(3)
    assert torch.equal(found.experts, best.indices.int())
    wanted = best.values / best.values.sum(-1, keepdim=True) if renormalizes else best.values
    assert torch.allclose(found.weights, 2.5 * wanted, rtol=1e-5)


def test_softmax_of_the_chosen_logits_is_the_renormalized_softmax_of_all() -> None:
    x, present = tokens()
    bias = torch.randn(NUM)
    router = make_router(Route(4), bias=bias)
    best = (x @ router.weight.t() + bias).topk(4)
    found = reference.route(x, router, present)
    assert torch.equal(found.experts, best.indices.int())
    assert torch.allclose(found.weights, best.values.softmax(-1), rtol=1e-5)


def test_a_selection_bias_changes_the_choice_and_not_the_weights() -> None:
    x, present = tokens()
    bias = torch.zeros(NUM)
    bias[6] = 100.0
    router = make_router(Route(2, Score.SIGMOID, renormalizes=False), selection_bias=bias)
    found = reference.route(x, router, present)
    assert found.experts[:, 0].tolist() == [6] * len(x)
    assert torch.allclose(found.weights[:, 0], (x @ router.weight[6]).sigmoid(), rtol=1e-5)


def test_factors_of_experts_come_after_the_renormalization() -> None:
    x, present = tokens()
    scale = torch.rand(NUM) + 0.5
    plain = reference.route(x, make_router(Route(3)), present)
    scaled = reference.route(x, make_router(Route(3), expert_scale=scale), present)
    assert torch.allclose(scaled.weights, plain.weights * scale[plain.experts.long()])


@pytest.mark.parametrize("group_best", [1, 2])
def test_experts_are_of_the_best_groups_even_below_zero(group_best: int) -> None:
    route = Route(3, Score.SIGMOID, groups=4, kept_groups=2, group_best=group_best)
    x, present = tokens(40)
    bias = torch.randn(NUM) - 5.0
    router = make_router(route, selection_bias=bias)
    found = reference.route(x, router, present)
    wanted = (x @ router.weight.t()).sigmoid() + bias
    worth = wanted.view(-1, 4, 2).topk(group_best).values.sum(-1)
    for row, chosen in enumerate(found.experts.tolist()):
        groups = set(worth[row].topk(2).indices.tolist())
        inside = [expert for expert in range(NUM) if expert // 2 in groups]
        assert chosen == sorted(inside, key=lambda expert: -wanted[row, expert].item())[:3]


def test_among_equals_the_lowest_number_is_chosen() -> None:
    router = make_router(Route(3))
    x, present = tokens()
    found = reference.route(torch.zeros_like(x), router, present)
    assert found.experts.tolist() == [[0, 1, 2]] * len(x)
    assert torch.allclose(found.weights, torch.full((len(x), 3), 1 / 3))


@pytest.mark.parametrize("has_gate", [False, True])
def test_each_token_has_the_shared_experts_behind_its_own(has_gate: bool) -> None:
    x, present = tokens()
    weight = torch.randn(NUM + has_gate, HIDDEN)
    router = Router(weight, Route(3), NUM, num_shared=2)
    found = reference.route(x, router, present)
    assert torch.equal(found.experts[:, 3:], torch.tensor([[NUM, NUM + 1]] * len(x)).int())
    opened = (x @ weight[-1]).sigmoid() if has_gate else torch.ones(len(x))
    assert torch.allclose(found.weights[:, 3:], opened[:, None].expand(-1, 2), rtol=1e-5)
    alone = reference.route(x, Router(weight[:NUM], Route(3), NUM), present)
    assert torch.equal(found.experts[:, :3], alone.experts) and torch.equal(found.weights[:, :3], alone.weights)


def test_padding_has_no_experts_and_no_output() -> None:
    x, _ = tokens()
    present = torch.tensor([3, 0, 7, 0, 1], dtype=torch.int32)
    found = reference.route(x, make_router(Route(3)), present)
    assert (found.experts[[1, 3]] == -1).all() and (found.weights[[1, 3]] == 0).all()
    out = reference.experts(x.index_fill(0, torch.tensor([1, 3]), torch.nan), found, make_weights())
    assert (out[[1, 3]] == 0).all() and out.isfinite().all()


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_sum_is_that_of_each_expert_alone(activation: Activation, has_bias: bool) -> None:
    x, present = tokens()
    weights = make_weights(activation=activation)
    if has_bias:
        biases = {"gate_up_bias": torch.randn(NUM, 2 * INNER), "down_bias": torch.randn(NUM, HIDDEN)}
        weights = replace(weights, **biases)  # type: ignore[arg-type]
    routing = reference.route(x, make_router(Route(3, renormalizes=False)), present)
    for row, out in enumerate(reference.experts(x, routing, weights)):
        total = torch.zeros(HIDDEN)
        for expert, weight in zip(routing.experts[row].tolist(), routing.weights[row], strict=True):
            both = weights.gate_up[expert] @ x[row]
            if weights.gate_up_bias is not None:
                both = both + weights.gate_up_bias[expert]
            made = weights.down[expert] @ _activated(both[:INNER], both[INNER:], activation)
            total += weight * (made if weights.down_bias is None else made + weights.down_bias[expert])
        assert torch.allclose(out, total, rtol=1e-4, atol=1e-4)


def _activated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    match activation:
        case Activation.SILU:
            return gate * gate.sigmoid() * up
        case Activation.GELU_TANH:
            return functional.gelu(gate, approximate="tanh") * up
        case Activation.CLAMPED_SWIGLU:
            gate, up = gate.minimum(torch.tensor(7.0)), up.minimum(torch.tensor(7.0)).maximum(torch.tensor(-7.0))
            return gate / (1 + (-1.702 * gate).exp()) * (up + 1)


def test_outputs_are_added_in_the_order_of_experts() -> None:
    """So that the sum of a token does not depend on the numbers of its experts, or on other tokens."""
    weights = make_weights(3)
    weights.down.zero_()
    for expert, value in enumerate((1e8, 1.0, -1e8)):
        weights.down[expert, :, 0] = value
    weights.gate_up[:, 0], weights.gate_up[:, INNER] = 1.0, 1.0
    x = torch.ones(1, HIDDEN) / HIDDEN

    def summed(*order: int) -> float:
        routing = Routing(torch.tensor([order]).int(), torch.ones(1, 3))
        return float(reference.experts(x, routing, weights)[0, 0])

    assert summed(0, 1, 2) == 0.0 and summed(0, 2, 1) == pytest.approx(0.731, rel=1e-2)
