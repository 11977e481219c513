"""Choice of experts by logits, on the device: the law is `common.ops.reference.experts.route`.

A program chooses for a token: as many times as experts are wanted, the best of those left.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.expert_operands import Choice, Routing
from common.kernels.base.pdl import wait_for_predecessor

LEAST = tl.constexpr(-(1 << 63))
"""Below the keys of all values, of NaN as well."""


@triton.jit
def _scores(logits, inside, SCORE: tl.constexpr):
    """Return the scores of all experts."""
    if SCORE == "softmax":
        powers = tl.where(inside, tl.exp(logits - tl.max(tl.where(inside, logits, float("-inf")), axis=0)), 0.0)
        scores = powers / tl.sum(powers, axis=0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    return scores


@triton.jit
def _keys(values, ids, BLOCK: tl.constexpr):
    """Return integers in the order of `values`, and among equal values from the last of `ids` to the first."""
    bits = values.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (BLOCK - 1 - ids).to(tl.int64)


@triton.jit
def _value_of(key):
    """Return the value that a key was made of."""
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _id_of(key, BLOCK: tl.constexpr):
    """Return the id that a key was made of."""
    return BLOCK - 1 - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _within_groups(
    keys,
    ids,
    NUM: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
):
    """Return the keys of the experts in the best groups, and LEAST elsewhere."""
    of_group, groups = ids // (NUM // GROUPS), tl.arange(0, GROUPS_BLOCK)
    group_keys = tl.full((GROUPS_BLOCK,), LEAST, tl.int64)
    for group in tl.static_range(GROUPS):
        left = tl.where(of_group == group, keys, LEAST)
        worth = 0.0
        for _ in tl.static_range(GROUP_BEST):
            best = tl.max(left, axis=0)
            worth += _value_of(best)
            left = tl.where(left == best, LEAST, left)
        worths = tl.zeros((GROUPS_BLOCK,), tl.float32) + worth
        group_keys = tl.where(groups == group, _keys(worths, groups, GROUPS_BLOCK), group_keys)
    kept = ids < 0
    for _ in tl.static_range(KEPT_GROUPS):
        best = tl.max(group_keys, axis=0)
        kept = kept | (of_group == _id_of(best, GROUPS_BLOCK))
        group_keys = tl.where(group_keys == best, LEAST, group_keys)
    return tl.where(kept, keys, LEAST)


@triton.jit
def _choose_experts_kernel(
    logits_ptr,  # [m, NUM], with a gate of the shared experts [m, NUM + 1]
    present_ptr,  # [m] int32
    bias_ptr,  # [NUM], if HAS_BIAS
    selection_bias_ptr,  # [NUM], if HAS_SELECTION_BIAS
    expert_scale_ptr,  # [NUM], if HAS_EXPERT_SCALE
    experts_ptr,  # [m, PER_TOKEN + NUM_SHARED] int32
    weights_ptr,  # [m, PER_TOKEN + NUM_SHARED] fp32
    scale,
    logit_scale,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, at least NUM
    PER_TOKEN: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    SLOTS_BLOCK: tl.constexpr,  # power of two, at least PER_TOKEN + NUM_SHARED
    SCORE: tl.constexpr,
    RENORMALIZES: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,  # power of two, at least GROUPS
    KEPT_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SELECTION_BIAS: tl.constexpr,
    HAS_EXPERT_SCALE: tl.constexpr,
    HAS_SHARED_GATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (m,). A program chooses for a token. A key in integers finds score and number of an expert at once."""
    token = tl.program_id(0).to(tl.int64)
    ids, slots = tl.arange(0, BLOCK), tl.arange(0, SLOTS_BLOCK)
    inside = ids < NUM
    WIDTH: tl.constexpr = NUM + 1 if HAS_SHARED_GATE else NUM
    wait_for_predecessor(PDL)
    is_padding = tl.load(present_ptr + token) <= 0
    logits = tl.load(logits_ptr + token * WIDTH + ids, mask=inside, other=0.0) * logit_scale
    if HAS_BIAS:
        logits += tl.load(bias_ptr + ids, mask=inside, other=0.0).to(tl.float32)
    scores = _scores(logits, inside, SCORE)
    wanted = scores
    if HAS_SELECTION_BIAS:
        wanted += tl.load(selection_bias_ptr + ids, mask=inside, other=0.0).to(tl.float32)
    keys = tl.where(inside, _keys(wanted, ids, BLOCK), LEAST)
    if KEPT_GROUPS < GROUPS:
        keys = _within_groups(keys, ids, NUM, GROUPS, GROUPS_BLOCK, KEPT_GROUPS, GROUP_BEST)

    experts = slots + (NUM - PER_TOKEN)  # right for the shared experts
    weights = tl.zeros((SLOTS_BLOCK,), tl.float32)
    for slot in tl.static_range(PER_TOKEN):
        best = tl.max(keys, axis=0)
        weight = _value_of(best)
        if HAS_SELECTION_BIAS:
            weight = tl.sum(tl.where(keys == best, scores, 0.0), axis=0)
        experts = tl.where(slots == slot, _id_of(best, BLOCK), experts)
        weights = tl.where(slots == slot, weight, weights)
        keys = tl.where(keys == best, LEAST, keys)
    if RENORMALIZES:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    weights *= scale
    is_chosen = slots < PER_TOKEN
    if HAS_EXPERT_SCALE:
        weights *= tl.load(expert_scale_ptr + experts, mask=is_chosen, other=0.0).to(tl.float32)
    if NUM_SHARED > 0:
        opened = 1.0
        if HAS_SHARED_GATE:
            opened = 1.0 / (1.0 + tl.exp(-tl.load(logits_ptr + token * WIDTH + NUM)))
        weights = tl.where(is_chosen, weights, opened)
    places = token * (PER_TOKEN + NUM_SHARED) + slots
    is_slot = slots < PER_TOKEN + NUM_SHARED
    tl.store(experts_ptr + places, tl.where(is_padding, -1, experts), mask=is_slot)
    tl.store(weights_ptr + places, tl.where(is_padding, 0.0, weights), mask=is_slot)


def choose_experts(
    logits: Tensor,  # [m, num_experts], or with a gate of the shared experts [m, num_experts + 1]; fp32, contiguous
    rule: Choice,
    present: Tensor,  # [m] int32, 0 for padding
    *,
    num_experts: int,
    num_shared: int = 0,
    bias: Tensor | None = None,  # [num_experts]
    selection_bias: Tensor | None = None,  # [num_experts]
    expert_scale: Tensor | None = None,  # [num_experts]
    pdl: bool = False,
) -> Routing:
    """Choose the experts of each token; none for padding."""
    (m, n), slots = logits.shape, rule.per_token + num_shared
    assert n in (num_experts, num_experts + 1), f"{n} logits: {num_experts}, or one more"
    assert logits.dtype == torch.float32 and logits.is_contiguous(), f"logits {logits.dtype}: contiguous fp32 needed"
    assert present.shape == (m,) and present.is_contiguous(), f"present {tuple(present.shape)}: [{m}] needed"
    assert num_experts % rule.groups == 0, f"{num_experts} experts: a multiple of {rule.groups} groups needed"
    experts = torch.empty((m, slots), dtype=torch.int32, device=logits.device)
    weights = torch.empty((m, slots), dtype=torch.float32, device=logits.device)
    if m == 0:
        return Routing(experts, weights)
    _choose_experts_kernel[(m,)](
        logits_ptr=logits,
        present_ptr=present,
        bias_ptr=logits if bias is None else bias,
        selection_bias_ptr=logits if selection_bias is None else selection_bias,
        expert_scale_ptr=logits if expert_scale is None else expert_scale,
        experts_ptr=experts,
        weights_ptr=weights,
        scale=rule.scale,
        logit_scale=rule.logit_scale,
        NUM=num_experts,
        BLOCK=triton.next_power_of_2(num_experts),
        PER_TOKEN=rule.per_token,
        NUM_SHARED=num_shared,
        SLOTS_BLOCK=triton.next_power_of_2(slots),
        SCORE=rule.score,
        RENORMALIZES=rule.renormalizes,
        GROUPS=rule.groups,
        GROUPS_BLOCK=triton.next_power_of_2(rule.groups),
        KEPT_GROUPS=rule.kept_groups,
        GROUP_BEST=rule.group_best,
        HAS_BIAS=bias is not None,
        HAS_SELECTION_BIAS=selection_bias is not None,
        HAS_EXPERT_SCALE=expert_scale is not None,
        HAS_SHARED_GATE=n > num_experts,
        PDL=pdl,
        num_warps=1 if num_experts <= 256 else 2,
        launch_pdl=pdl,
    )
    return Routing(experts, weights)
