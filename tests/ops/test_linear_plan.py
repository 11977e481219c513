"""Plans are found by shape and token count, and every measured one can be launched."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from common.kernels.base.gpu import Gpu
from common.ops.base import Scheme
from common.ops.base.weight import WEIGHT_ONLY
from common.ops.linear_plan import (
    MAX_PACKED_RING_TOKENS,
    MAX_PACKED_TOKENS,
    MAX_SKINNY_TOKENS,
    MIN_GATED_TOKENS,
    PLANS,
    SHORT_STEPS,
    Fusion,
    Kind,
    LinearPlans,
    Plan,
    PromptPlans,
    element_bytes,
    plan_file,
    rule_of_thumb,
)

H200 = Gpu("NVIDIA H200", (9, 0), num_sms=132, shared_bytes=227 << 10)
FILES = sorted(PLANS.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_measured_plans_are_complete(path: Path) -> None:
    table = json.loads(path.read_text())
    plans = LinearPlans(replace(H200, name=table["gpu"]))
    assert plan_file(table["gpu"]) == path
    for row in table["plans"]:
        scheme = Scheme(row.get("scheme", "plain"))
        plan = plans.plan(Fusion(row["fusion"]), row["max_tokens"], row["n"], row["k"], scheme)
        assert plan == Plan(Kind(row["kind"]), **row["tiles"])
        check(plan, row["max_tokens"])


def check(plan: Plan, num_tokens: int) -> None:
    match plan.kind:
        case Kind.GEMV:
            assert num_tokens == 1
            assert min(plan.rows, plan.warps, plan.stages) > 0
        case Kind.SKINNY:
            assert num_tokens <= MAX_SKINNY_TOKENS
            assert min(plan.block_n, plan.block_k, plan.splits, plan.stages, plan.warps) > 0
        case Kind.RING if plan.token_stages:
            assert num_tokens <= MAX_PACKED_RING_TOKENS
            assert min(plan.block_k // 128, plan.splits) > 0 and min(plan.stages, plan.token_stages) > 1
        case Kind.RING:
            assert num_tokens <= MAX_SKINNY_TOKENS
            assert min(plan.block_k, plan.splits, plan.stages) > 0
        case Kind.GATED:
            assert num_tokens >= MIN_GATED_TOKENS and plan == Plan(Kind.GATED)
        case Kind.PACKED:
            assert num_tokens <= MAX_SKINNY_TOKENS
            assert min(plan.rows, plan.splits, plan.stages, plan.warps) > 0
        case Kind.CUBLAS:
            assert plan == Plan(Kind.CUBLAS)


def test_each_scheme_has_plans_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.ops.linear_plan.PLANS", tmp_path)
    row = {"fusion": "add", "n": 64, "k": 256, "max_tokens": 8, "kind": "ring"}
    tiles = {"block_k": 128, "splits": 1}
    rows = [row | {"tiles": tiles | {"stages": 2}}, row | {"scheme": "fp8", "tiles": tiles | {"stages": 1}}]
    (tmp_path / "some_gpu.json").write_text(json.dumps({"gpu": "Some GPU", "plans": rows}))
    plans = LinearPlans(replace(H200, name="Some GPU"))
    found = [plans.plan(Fusion.ADD, 8, 64, 256, scheme) for scheme in (Scheme.PLAIN, Scheme.FP8)]
    assert found == [Plan(Kind.RING, stages=stages, **tiles) for stages in (2, 1)]
    assert plans.plan(Fusion.ADD, 8, 64, 256, Scheme.INT8) == rule_of_thumb(Fusion.ADD, 8, 64, 256, H200, Scheme.INT8)


def test_a_count_between_two_measured_ones_takes_the_larger() -> None:
    plans = LinearPlans(H200)
    assert plans.plan(Fusion.ADD, 2, 2560, 4096) == plans.plan(Fusion.ADD, 4, 2560, 4096)
    assert plans.plan(Fusion.ADD, 100, 2560, 4096) == plans.plan(Fusion.ADD, 128, 2560, 4096)
    assert plans.plan(Fusion.ADD, 8192, 2560, 4096) == Plan(Kind.CUBLAS)


@pytest.mark.parametrize("fusion", Fusion)
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 64, 65, 10_000])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("scheme", Scheme)
def test_unknown_shapes_and_gpus_have_a_plan(
    fusion: Fusion, num_tokens: int, capability: tuple[int, int], scheme: Scheme
) -> None:
    gpu = Gpu("Some GPU", capability, num_sms=100, shared_bytes=99 << 10)
    for n, k in ((1, 1), (300, 64), (6144, 2560), (2560, 9728), (8192, 28_672), (151_936, 8192)):
        plan = LinearPlans(gpu).plan(fusion, num_tokens, n, k, scheme)
        assert plan == rule_of_thumb(fusion, num_tokens, n, k, gpu, scheme)
        assert gpu.is_hopper or plan.kind not in (Kind.RING, Kind.GATED)
        is_gated = gpu.is_hopper and fusion is Fusion.GATE and num_tokens >= MIN_GATED_TOKENS and n % 8 == k % 8 == 0
        assert (plan.kind is Kind.GATED) == (is_gated and scheme is Scheme.PLAIN)
        is_ring = scheme in WEIGHT_ONLY and gpu.is_hopper and 1 < num_tokens <= MAX_PACKED_RING_TOKENS
        is_packed = scheme in WEIGHT_ONLY and num_tokens <= MAX_PACKED_TOKENS and not is_ring
        assert (plan.kind is Kind.PACKED) == is_packed and (plan.token_stages > 0) == is_ring
        check(plan, num_tokens)
        if is_ring:
            check_packed_ring(plan, fusion, num_tokens, WEIGHT_ONLY[scheme])
        elif plan.kind is Kind.RING:
            check_ring(plan, fusion, num_tokens, k, scheme)


def check_ring(plan: Plan, fusion: Fusion, num_tokens: int, k: int, scheme: Scheme) -> None:
    """That the kernel takes it, and a multiprocessor's shared memory holds it."""
    rows = 64 * (2 if fusion is Fusion.GATE else 1) + max(8, num_tokens)
    assert k % (plan.splits * plan.block_k) == 0 and (plan.splits == 1 or fusion is Fusion.ADD)
    assert 1 <= plan.stages <= k // (plan.splits * plan.block_k)
    assert plan.stages * rows * plan.block_k * element_bytes(scheme) <= 220_000


def check_packed_ring(plan: Plan, fusion: Fusion, num_tokens: int, bits: int) -> None:
    """That a multiprocessor's shared memory holds two programs."""
    codes, tokens = 64 * (2 if fusion is Fusion.GATE else 1) * bits // 8, min(max(8, num_tokens), 64) * 2
    assert plan.splits == 1 or fusion is Fusion.ADD
    assert plan.block_k * (plan.stages * codes + plan.token_stages * tokens) <= 110_000


def test_prompts_have_kernels_of_ours_for_one_token_and_for_many() -> None:
    plans = PromptPlans(LinearPlans(H200))
    kinds = [plans.plan(Fusion.GATE, num_tokens, 9728, 2560).kind for num_tokens in (1, 2, 63, 65, 1023, 1024)]
    assert kinds == [Kind.GEMV, *[Kind.CUBLAS] * 4, Kind.GATED]
    for num_tokens in SHORT_STEPS:
        assert plans.plan(Fusion.GATE, num_tokens, 9728, 2560) == plans.plans.plan(Fusion.GATE, num_tokens, 9728, 2560)
