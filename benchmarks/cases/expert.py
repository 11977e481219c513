"""Layers of experts of known models, in steps of few and of many tokens: the choice of experts, and their products.

Tokens are random, so choices have no preference. `num_bytes` are the matrices of the experts chosen, read once, and the
tokens read and written.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product, starmap

import torch
from torch import Tensor

from benchmarks.cases.kernel import EPS, MAX_STEP_TOKENS, Case, random
from common.base.activation import Activation
from common.base.routing import Route
from common.kernels.base.gpu import gpu_of
from common.ops import reference
from common.ops.base import BLOCK, ExpertWeights, GroupCache, Norm, Residual, Router
from common.ops.cuda_ops import CudaOps
from common.settings.config import KernelsSection

TOKENS = (1, 8, 64, 512)
VARIANTS = 8  # sets of tokens, which choose different experts


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Sizes of a layer of experts."""

    name: str
    hidden: int
    inner: int
    num: int
    per_token: int
    num_shared: int = 0
    form: str = "plain"

    @property
    def expert_bytes(self) -> float:
        return 3 * self.inner * self.hidden * ELEMENT_BYTES[self.form]


ELEMENT_BYTES = {
    "plain": 2.0, "mxfp4": 4.25 / 8, "fp8 in blocks": 1.0, "int8": 1.0,
    "int4 in 128": 0.5 + 2 / 128, "int4 in 128 with zeros": 0.5 + 8 / 128, "int4 in 32": 0.5 + 2 / 32,
}  # fmt: skip
"""Bytes of an element of a matrix, by its form."""
SIZES = (
    ExpertSizes("qwen3-30b-a3b", 2048, 768, 128, 8),
    ExpertSizes("qwen3.6-35b-a3b", 2048, 512, 256, 8, num_shared=1),
    ExpertSizes("gpt-oss-20b", 2880, 2880, 32, 4, form="mxfp4"),
)
CODES = [form for form in ELEMENT_BYTES if form not in ("plain", "mxfp4")]
IN_CODES = [replace(sizes, form=form) for sizes in SIZES[:2] for form in CODES]


def make_router(sizes: ExpertSizes) -> Router:
    rows = sizes.num + (sizes.num_shared > 0)
    return Router(random(rows, sizes.hidden) * 0.02, Route(sizes.per_token), sizes.num, sizes.num_shared)


def make_weights(sizes: ExpertSizes) -> ExpertWeights:
    """Make random matrices, which are in MXFP4 and have biases for gpt-oss."""
    num, hidden, inner = sizes.num + sizes.num_shared, sizes.hidden, sizes.inner
    if sizes.form == "plain":
        return ExpertWeights(random(num, 2 * inner, hidden) * 0.02, random(num, hidden, inner) * 0.02, Activation.SILU)
    if sizes.form.startswith("int4"):
        return make_integers(sizes)
    if sizes.form != "mxfp4":
        (gate_up, gate_up_scales), (down, down_scales) = (
            make_codes(sizes.form, num, *shape) for shape in ((2 * inner, hidden), (hidden, inner))
        )
        scales = {"gate_up_scales": gate_up_scales, "down_scales": down_scales}
        return ExpertWeights(gate_up, down, Activation.SILU, **scales)

    def some_bytes(*shape: int, most: int = 256, least: int = 0) -> Tensor:
        return torch.randint(least, most, shape, dtype=torch.uint8, device="cuda")

    return ExpertWeights(
        gate_up=some_bytes(num, 2 * inner, hidden // 2),
        down=some_bytes(num, hidden, inner // 2),
        activation=Activation.CLAMPED_SWIGLU,
        gate_up_bias=random(num, 2 * inner),
        down_bias=random(num, hidden),
        gate_up_scales=some_bytes(num, 2 * inner, hidden // 32, least=118, most=122),
        down_scales=some_bytes(num, hidden, inner // 32, least=118, most=122),
    )


def make_integers(sizes: ExpertSizes) -> ExpertWeights:
    """Make random codes of 4 bits in groups; products are about as large as those of plain matrices."""
    num, group, has_zeros = sizes.num + sizes.num_shared, int(sizes.form.split()[2]), sizes.form.endswith("zeros")
    data, scales, offsets = list[Tensor](), list[Tensor](), list[Tensor | None]()
    for num_rows, width in ((2 * sizes.inner, sizes.hidden), (sizes.hidden, sizes.inner)):
        data.append(torch.randint(256, (num, num_rows, width // 2), dtype=torch.uint8, device="cuda"))
        of_groups = torch.full((num, num_rows, width // group), 0.004, device="cuda")
        zeros = torch.randint(6, 11, of_groups.shape, device="cuda")
        scales.append(of_groups if has_zeros else of_groups.half())
        offsets.append(of_groups * -zeros if has_zeros else None)
    return ExpertWeights(data[0], data[1], Activation.SILU, None, None, *scales, *offsets)


def make_codes(form: str, num: int, num_rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Make random codes, and scales of their blocks or rows; products are about as large as those of plain matrices."""
    codes = torch.randint(-127, 128, (num, num_rows, width), dtype=torch.int8, device="cuda")
    if form == "int8":
        return codes, torch.full((num, num_rows, 1), 0.0003, device="cuda")
    grid = (num, -(-num_rows // BLOCK), -(-width // BLOCK))
    return (codes.half() / 64).to(torch.float8_e4m3fn), torch.full(grid, 0.02, device="cuda")


def make_ops(num_tokens: int) -> CudaOps:
    pool = random(1, 1, 2, 16, 1, 64)
    pdl = num_tokens <= MAX_STEP_TOKENS and gpu_of(pool.device).has_dependent_launch
    return CudaOps([GroupCache(pool, 1)], KernelsSection(), num_tokens, pdl=pdl)


def route_case(sizes: ExpertSizes, num_tokens: int) -> Case:
    """Make a case of the norm and the choice of experts; the result are the weights."""
    router, xs = make_router(sizes), random(VARIANTS, num_tokens, sizes.hidden)
    norm, present = Norm(random(sizes.hidden), EPS), torch.ones(num_tokens, dtype=torch.int32, device="cuda")
    ops, num_bytes = make_ops(num_tokens), router.weight.numel() * 2 + num_tokens * sizes.hidden * 4

    def run(i: int) -> Tensor:
        return ops.norm_route(Residual(xs[i]), norm, router, present)[1].weights

    def expected() -> Tensor:
        return reference.route(reference.rms_norm(xs[0], norm.weight, EPS), router, present).weights

    return Case(f"route {sizes.name} {num_tokens}", run, expected, VARIANTS, num_bytes)


def experts_case(sizes: ExpertSizes, num_tokens: int) -> Case:
    """Make a case of the experts and the next norm, which adds up their outputs."""
    weights, ops, router = make_weights(sizes), make_ops(num_tokens), make_router(sizes)
    present = torch.ones(num_tokens, dtype=torch.int32, device="cuda")
    xs, norm = random(VARIANTS, num_tokens, sizes.hidden), Norm(random(sizes.hidden), EPS)
    routings, rows = [reference.route(x, router, present) for x in xs], torch.zeros_like(xs[0])
    num_read = sum(len(each.experts.unique()) for each in routings) / VARIANTS
    num_pairs = num_tokens * (sizes.per_token + sizes.num_shared)

    def run(i: int) -> Tensor:
        return ops.norm(ops.experts_add(xs[i], routings[i], weights, Residual(rows)), norm)

    def expected() -> Tensor:
        return reference.rms_norm(reference.experts(xs[0], routings[0], weights).to(xs.dtype), norm.weight, EPS)

    return Case(
        f"experts {sizes.name} {num_tokens}" + ("" if sizes in SIZES else f" {sizes.form}"),
        run,
        expected,
        VARIANTS,
        num_read * sizes.expert_bytes + num_tokens * sizes.hidden * 4,
        num_pairs * 6 * sizes.hidden * sizes.inner,
    )


def expert_cases() -> Iterator[Case]:
    """Yield cases lazily, because the matrices of all cases would not fit at once."""
    yield from starmap(route_case, product(SIZES, TOKENS))
    yield from starmap(experts_case, product([*SIZES, *IN_CODES], TOKENS))
