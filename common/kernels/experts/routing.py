"""Choice of experts on the device: the law is `common.ops.reference.experts.route`.

Two launches. The first multiplies tokens by the router's matrix, spread over outputs so that few tokens read the matrix
fast. In the second a program chooses for a token: as many times as experts are wanted, the best of those left.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.expert_operands import Choice, Routing
from common.kernels.base.pdl import wait_for_predecessor
from common.kernels.products.gemv import gemv

FEW_TOKENS = 64  # up to here, tiles have few tokens and long rows


@triton.jit(do_not_specialize=["m"])
def _router_logits_kernel(
    x_ptr,  # [m, k], contiguous
    weight_ptr,  # [n, k], contiguous
    out_ptr,  # [m, n] fp32
    m,
    n,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (cdiv(n, BLOCK_N), cdiv(m, BLOCK_M))."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside_n, inside_m = (rows < n)[:, None], (tokens < m)[None, :]
    x_row_ptr = x_ptr + tokens[None, :].to(tl.int64) * K
    wait_for_predecessor(PDL)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK_K)
        inside_k = columns < K
        x = tl.load(x_row_ptr + columns[:, None], mask=inside_m & inside_k[:, None], other=0.0)
        weight = tl.load(
            weight_ptr + rows[:, None] * K + columns[None, :], mask=inside_n & inside_k[None, :], other=0.0
        )
        acc = tl.dot(weight, x, acc, input_precision="ieee")
    tl.store(out_ptr + tokens[None, :].to(tl.int64) * n + rows[:, None], acc, mask=inside_n & inside_m)


@triton.jit
def _scores(logits, inside, SCORE: tl.constexpr):
    """Return the scores of all experts."""
    if SCORE == "softmax":
        powers = tl.where(inside, tl.exp(logits - tl.max(tl.where(inside, logits, float("-inf")), axis=0)), 0.0)
        scores = powers / tl.sum(powers, axis=0)
    elif SCORE == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.sqrt(tl.where(logits > 20.0, logits, tl.log(1.0 + tl.exp(tl.minimum(logits, 20.0)))))
    return scores


@triton.jit
def _best(values, ids, END: tl.constexpr):
    """Return the highest value, and the lowest of the `ids` that have it; END - 1 if all are NaN."""
    best = tl.max(values, axis=0)
    return best, tl.minimum(tl.min(tl.where(values == best, ids, END), axis=0), END - 1)


@triton.jit
def _within_groups(
    wanted,
    ids,
    NUM: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
):
    """Return the scores with -inf outside the best groups."""
    of_group, groups = ids // (NUM // GROUPS), tl.arange(0, GROUPS_BLOCK)
    worth = tl.full((GROUPS_BLOCK,), float("-inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        left = tl.where(of_group == group, wanted, float("-inf"))
        total = 0.0
        for _ in tl.static_range(GROUP_BEST):
            best, place = _best(left, ids, NUM)
            total += best
            left = tl.where(ids == place, float("-inf"), left)
        worth = tl.where(groups == group, total, worth)
    kept = ids < 0
    for _ in tl.static_range(KEPT_GROUPS):
        _, chosen = _best(worth, groups, GROUPS)
        kept = kept | (of_group == chosen)
        worth = tl.where(groups == chosen, float("-inf"), worth)
    return tl.where(kept, wanted, float("-inf"))


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
    """Grid: (m,). A program chooses for a token."""
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
    wanted = tl.where(inside, wanted, float("-inf"))
    if KEPT_GROUPS < GROUPS:
        wanted = _within_groups(wanted, ids, NUM, GROUPS, GROUPS_BLOCK, KEPT_GROUPS, GROUP_BEST)

    experts = slots + (NUM - PER_TOKEN)  # right for the shared experts
    weights = tl.zeros((SLOTS_BLOCK,), tl.float32)
    for slot in tl.static_range(PER_TOKEN):
        _, chosen = _best(wanted, ids, NUM)
        experts = tl.where(slots == slot, chosen, experts)
        weights = tl.where(slots == slot, tl.sum(tl.where(ids == chosen, scores, 0.0), axis=0), weights)
        wanted = tl.where(ids == chosen, float("-inf"), wanted)
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


def route(
    x: Tensor,  # [m, k], contiguous
    weight: Tensor,  # [num_experts, k], or with a gate of the shared experts [num_experts + 1, k]
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
    (m, k), n, slots = x.shape, weight.shape[0], rule.per_token + num_shared
    has_shared_gate = n > num_experts
    assert weight.shape == (num_experts + has_shared_gate, k), f"router {tuple(weight.shape)}: [{num_experts}, {k}]"
    assert x.is_contiguous() and weight.is_contiguous() and weight.dtype == x.dtype, "x and router: contiguous, alike"
    assert present.shape == (m,) and present.is_contiguous(), f"present {tuple(present.shape)}: [{m}] needed"
    assert num_experts % rule.groups == 0, f"{num_experts} experts: a multiple of {rule.groups} groups needed"
    experts = torch.empty((m, slots), dtype=torch.int32, device=x.device)
    weights = torch.empty((m, slots), dtype=torch.float32, device=x.device)
    if m == 0:
        return Routing(experts, weights)
    logits = _logits(x, weight, pdl=pdl)
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
        HAS_SHARED_GATE=has_shared_gate,
        PDL=pdl,
        num_warps=1 if num_experts <= 256 else 2,
        launch_pdl=pdl,
    )
    return Routing(experts, weights)


def _logits(x: Tensor, weight: Tensor, *, pdl: bool) -> Tensor:
    """Return `x @ weight.T`: fp32 `[m, n]`."""
    (m, k), n = x.shape, weight.shape[0]
    logits = torch.empty((m, n), dtype=torch.float32, device=x.device)
    if m == 1:
        return gemv(x, weight, logits, rows=1, warps=1, stages=8, pdl=pdl)
    block_m, block_n, block_k = (16, 16, 512) if m <= FEW_TOKENS else (64, 64, 128)
    _router_logits_kernel[(triton.cdiv(n, block_n), triton.cdiv(m, block_m))](
        x_ptr=x,
        weight_ptr=weight,
        out_ptr=logits,
        m=m,
        n=n,
        K=k,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k * 2 // x.element_size(),
        STAGES=3,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return logits
