"""Law of layers of experts: the choice of experts by a router, and the weighted sum of their outputs.

Logits, scores and weights are fp32. A token's outputs are added up in the order of its experts, so the sum does not
depend on other tokens.
"""

import torch
from torch import Tensor
from torch.nn import functional

from common.base.routing import Route, Score
from common.kernels.base.expert_operands import ExpertMatrix, Form
from common.ops.base import ExpertWeights, Router, Routing, Weight, unpack_quarters
from common.ops.reference.layers import gate_mul
from common.ops.reference.mxfp4 import from_mxfp4
from common.ops.reference.products import MIDDLE, dequantized


def route(x: Tensor, router: Router, present: Tensor) -> Routing:
    """Choose the experts of each token of `x [num_tokens, hidden]`; none where `present [num_tokens]` is 0."""
    rule, num_experts = router.route, router.num_experts
    product = x.float() @ router.weight.float().t()
    logits = product[:, :num_experts] * rule.logit_scale
    if router.bias is not None:
        logits = logits + router.bias
    scores = _scores(logits, rule.score)
    wanted = scores if router.selection_bias is None else scores + router.selection_bias
    order = torch.sort(_within_groups(wanted, rule), dim=-1, descending=True, stable=True).indices
    chosen = order[:, : rule.per_token]
    weights = scores.gather(1, chosen)
    if rule.renormalizes:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * rule.scale
    if router.expert_scale is not None:
        weights = weights * router.expert_scale[chosen]
    shared = torch.arange(num_experts, num_experts + router.num_shared, device=x.device).expand(x.shape[0], -1)
    opened = product[:, num_experts:].sigmoid() if router.has_shared_gate else torch.ones_like(product[:, :1])
    experts = torch.cat((chosen, shared), dim=1)
    weights = torch.cat((weights, opened.expand(-1, router.num_shared)), dim=1)
    is_padding = (present <= 0)[:, None]
    return Routing(experts.masked_fill(is_padding, -1).int(), weights.masked_fill(is_padding, 0.0))


def _scores(logits: Tensor, score: Score) -> Tensor:
    return logits.softmax(-1) if score is Score.SOFTMAX else logits.sigmoid()


def _within_groups(wanted: Tensor, rule: Route) -> Tensor:
    """Return the scores with -inf outside the groups that a token chooses."""
    if rule.groups == rule.kept_groups:
        return wanted
    by_group = wanted.unflatten(1, (rule.groups, -1))
    worth = by_group.topk(rule.group_best, dim=-1).values.sum(-1)
    order = torch.sort(worth, dim=-1, descending=True, stable=True).indices
    is_kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, order[:, : rule.kept_groups], value=True)
    return torch.where(is_kept[..., None], by_group, float("-inf")).flatten(1)


def experts(x: Tensor, routing: Routing, weights: ExpertWeights) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts: fp32 `[num_tokens, hidden]`, 0 for padding."""
    num_tokens, num_slots = routing.experts.shape
    outputs = torch.zeros((num_tokens, num_slots, weights.down.shape[1]), device=x.device)
    for expert in routing.experts.unique().tolist():
        if expert < 0:
            continue
        tokens, slots = torch.where(routing.experts == expert)
        inner = gate_mul(_product(x[tokens], weights.gate_up_matrix, expert), weights.activation)
        output = _product(inner, weights.down_matrix, expert).float()
        outputs[tokens, slots] = output * routing.weights[tokens, slots, None]
    total: Tensor = outputs[:, 0]
    for slot in range(1, num_slots):
        total = total + outputs[:, slot]
    return total


def _product(x: Tensor, matrix: ExpertMatrix, expert: int) -> Tensor:
    """Return the product with an expert's matrix, in the dtype of `x`; elements of codes are not rounded."""
    bias = None if matrix.bias is None else matrix.bias[expert]
    if matrix.form is Form.PLAIN:
        return functional.linear(x, matrix.data[expert], bias)
    elements = elements_of(matrix, expert)
    if matrix.form is Form.MXFP4:
        return functional.linear(x, elements.to(x.dtype), bias)
    return functional.linear(x.float(), elements, None if bias is None else bias.float()).to(x.dtype)


def elements_of(matrix: ExpertMatrix, expert: int) -> Tensor:
    """Return the elements of an expert's matrix in codes: fp32 `[n, k]`."""
    assert matrix.scales is not None, "a matrix in codes"
    data, scales = matrix.data[expert], matrix.scales[expert]
    if matrix.form is Form.MXFP4:
        return from_mxfp4(data, scales)
    if matrix.form is Form.BYTES:
        return dequantized(Weight(data, None, scales))
    codes = unpack_quarters(data).float()
    if matrix.offsets is None:
        codes -= MIDDLE
    groups: Tensor = codes.unflatten(1, (scales.shape[1], -1)) * scales.float()[..., None]
    if matrix.offsets is not None:
        groups += matrix.offsets[expert].float()[..., None]
    return groups.flatten(1)
