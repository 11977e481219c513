"""Candidate plans for multiplying a few tokens by a model's matrices, and a check of each plan's result."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.presets import settings
from common.kernels.base.gpu import Gpu, gpu_of
from common.kernels.elementwise.quantize import quantize
from common.kernels.products.quantized_gemv import COLUMNS, QUAD
from common.models.reading import decoder_config
from common.models.sizes.attention import Attention
from common.models.sizes.latent import Latent
from common.models.sizes.mlp import GatedMLP
from common.models.sizes.parallel_experts import ParallelExperts
from common.ops.base import BLOCK, Activation, Norm, Residual, Scheme, Weight, float_codes, pack, scale_bytes
from common.ops.base.floats import GROUP as FLOAT_GROUP
from common.ops.base.weight import SCHEMES, WEIGHT_ONLY
from common.ops.linear import FusedLinear
from common.ops.linear_plan import MAX_PACKED_TOKENS, Fusion, Kind, Plan, element_bytes
from common.ops.packed_linear import PackedLinear
from common.ops.quantized_linear import QuantizedLinear

MAX_TILES = 40  # of a row of codes, because the kernel has code for each
SHARED_SPARE_BYTES = 12_000  # used by a program beside its tiles
EPS = 1e-6
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between neighbouring magnitudes of floats of 4 bits, of which LARGEST_FLOAT is the last."""
LARGEST_FLOAT = 6.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A product of a model: `n` outputs from `k` inputs."""

    fusion: Fusion
    n: int
    k: int
    scheme: Scheme = Scheme.PLAIN

    @property
    def rows(self) -> int:
        return self.n * (2 if self.fusion is Fusion.GATE else 1)


def shapes_of(preset: str, scheme: Scheme = Scheme.PLAIN) -> list[Shape]:
    """Return the products of all distinct layers of a known model, in a scheme, and of its head, which is plain.

    So are rows that are not packed whole.
    """
    config = decoder_config(settings(preset))
    hidden, shapes = config.hidden_size, []
    for layer in dict.fromkeys(config.layers):
        mixer = layer.mixer
        dense = layer.mlp.dense if isinstance(layer.mlp, ParallelExperts) else layer.mlp
        if isinstance(mixer, Attention):
            shapes += [Shape(Fusion.NORM, mixer.qkv_width, hidden)]
            shapes += [Shape(Fusion.NORM, mixer.q_width, hidden)] if mixer.has_gate else []
            shapes += [Shape(Fusion.ADD, hidden, mixer.q_width)]
        else:
            shapes += [Shape(Fusion.NORM, mixer.in_rows, hidden), Shape(Fusion.ADD, hidden, mixer.value_width)]
        if isinstance(mixer, Latent) and mixer.q_rank:
            shapes += [Shape(Fusion.NORM, mixer.q_width, mixer.q_rank)]
        if isinstance(dense, GatedMLP):
            shapes += [Shape(Fusion.GATE, dense.inner, hidden), Shape(Fusion.ADD, hidden, dense.inner)]
    is_narrow = WEIGHT_ONLY.get(scheme) == 4  # codes of 4 bits lie in blocks
    shapes = [shape if is_narrow and shape.k % BLOCK else replace(shape, scheme=scheme) for shape in shapes]
    return list(dict.fromkeys([*shapes, Shape(Fusion.LOGITS, config.vocab_size, hidden)]))


TILES = (  # block_n, block_k, stages
    (16, 128, 5), (16, 256, 4), (32, 128, 4), (32, 128, 5), (32, 256, 4), (64, 64, 4), (64, 64, 6), (64, 128, 3),
    (64, 128, 5), (128, 64, 4),
)  # fmt: skip


def candidates(shape: Shape, tokens: int, gpu: Gpu) -> Iterator[Plan]:
    """Yield plans for `tokens` times a product, cuBLAS or another library first."""
    yield Plan(Kind.CUBLAS)
    if shape.scheme in WEIGHT_ONLY:
        if gpu.is_hopper and (tokens > 1 or shape.fusion is not Fusion.ADD):
            yield from _packed_ring_candidates(shape, tokens, gpu)
        if tokens > MAX_PACKED_TOKENS:
            return
        yield from _packed_candidates(shape, tokens)
        return
    if tokens == 1:
        yield from _gemv_candidates(shape) if shape.scheme is Scheme.PLAIN else _coded_gemv_candidates(shape)
    else:
        yield from _skinny_candidates(shape, tokens, gpu)
    if gpu.is_hopper:
        yield from _ring_candidates(shape, tokens)


def _coded_gemv_candidates(shape: Shape) -> Iterator[Plan]:
    """Yield GEMV plans for codes of 8 bits, of which a thread holds the tiles on the way: four words in two halves."""
    for rows, warps, stages in product((8, 16), (1, 2, 4, 8), (3, 5, 8, 10, 16)):
        tiles = -(-shape.k // (QUAD * COLUMNS * warps))
        if stages <= tiles <= MAX_TILES and rows * stages <= 128:
            yield Plan(Kind.GEMV, rows=rows, warps=warps, stages=stages)


def _gemv_candidates(shape: Shape) -> Iterator[Plan]:
    """Yield GEMV plans of plain elements within the registers of a thread, because a thread holds all loads ahead.

    Programs of a single warp are fastest, programs of four warps for long rows.
    """
    sides = 2 if shape.fusion is Fusion.GATE else 1
    for rows, (warps, unroll), stages in product((1, 2, 4), ((1, 1), (1, 2), (2, 1), (4, 1)), (1, 2, 3, 5)):
        tiles = -(-shape.k // (256 * warps * unroll))
        registers = 4 * rows * unroll * sides * stages
        if stages <= tiles and 16 <= registers <= 80 and rows * unroll * sides <= 8:
            yield Plan(Kind.GEMV, rows=rows, warps=warps, unroll=unroll, stages=stages)


def _skinny_candidates(shape: Shape, tokens: int, gpu: Gpu) -> Iterator[Plan]:
    sides = 2 if shape.fusion is Fusion.GATE else 1
    splits = (1, 2, 4, 8) if shape.fusion is Fusion.ADD else (1,)
    for (block_n, block_k, stages), split in product(TILES, splits):
        programs = -(-shape.n // block_n) * split
        shared_bytes = (block_n * sides + max(tokens, 16)) * block_k * element_bytes(shape.scheme) * (stages - 1)
        if programs < 80 or (split > 1 and programs > 700) or shared_bytes > gpu.shared_bytes - SHARED_SPARE_BYTES:
            continue
        if (block_n < 64 and tokens > 16) or (block_n == 128 and tokens < 32) or (block_n == 16 and split > 1):
            continue
        yield Plan(
            Kind.SKINNY, block_n=block_n, block_k=block_k, splits=split, stages=stages, warps=8 if block_n == 128 else 4
        )


def _ring_candidates(shape: Shape, tokens: int) -> Iterator[Plan]:
    """Yield rings small enough for a program of the next kernel on the same multiprocessor, and larger rings."""
    sides = 2 if shape.fusion is Fusion.GATE else 1
    splits = (1, 2, 4, 8) if shape.fusion is Fusion.ADD else (1,)
    plans, num_bytes = [], element_bytes(shape.scheme)
    tiles = (64, 128, 256) if shape.scheme is Scheme.PLAIN else (128, 256)
    for block_k, ring_bytes, split in product(tiles, (50_000, 74_000, 110_000, 160_000, 210_000), splits):
        programs = -(-shape.n // 64) * split
        slot_bytes = (64 * sides + max(tokens, 8)) * block_k * num_bytes
        stages = min(ring_bytes // slot_bytes, shape.k // (split * block_k))
        if programs >= 76 and stages >= 2 and shape.k % (split * block_k) == 0:
            plans.append(Plan(Kind.RING, block_k=block_k, stages=stages, splits=split))
    yield from dict.fromkeys(plans)


def _bits(shape: Shape) -> int:
    """Return the bits of a code of a weight-only scheme."""
    return WEIGHT_ONLY[shape.scheme]


def _packed_candidates(shape: Shape, tokens: int) -> Iterator[Plan]:
    """Yield plans within the registers of a thread: loads ahead, tokens, and sums.

    Programs of a lone token begin with all of their loads, or half of them, but at most 10 tiles.
    """
    eights, splits = -(-tokens // 8), (1, 2, 4) if shape.fusion is Fusion.ADD and tokens > 1 else (1,)
    columns = 512 // _bits(shape)
    for rows, warps, split in product((16, 32) if tokens == 1 else (16, 32, 64), (4, 8), splits):
        tiles, programs = -(-shape.k // (columns * warps * split)), -(-shape.rows // rows) * split
        for stages in dict.fromkeys(min(each, 10) for each in ((tiles, -(-tiles // 2)) if tokens == 1 else (2, 4))):
            registers = rows // 16 * (8 * stages + 4 * eights) + 20 * eights
            is_small = stages <= tiles <= MAX_TILES and registers <= 130
            if is_small and programs * warps >= 264 and (split == 1 or programs <= 700):
                yield Plan(Kind.PACKED, rows=rows, warps=warps, stages=stages, splits=split)


def _packed_ring_candidates(shape: Shape, tokens: int, gpu: Gpu) -> Iterator[Plan]:
    """Yield rings of which a multiprocessor holds three, two or one, and splits of K that give each one program or two.

    A lone token is normed in shared memory, beside the ring of codes.
    """
    sides, wide = 2 if shape.fusion is Fusion.GATE else 1, min(max(8, 1 << (tokens - 1).bit_length()), 64)
    programs, plans, bits = -(-shape.n // 64) * -(-tokens // wide), [], _bits(shape)
    splits = {1, *(max(1, each * gpu.num_sms // programs) for each in (1, 2))} if shape.fusion is Fusion.ADD else {1}
    for blocks, ring_bytes, split in product((1, 2, 4), (72_000, 108_000, 200_000), sorted(splits)):
        tiles = -(-shape.k // (128 * blocks * split))
        token_stages = (
            tiles if tokens == 1 else max(2, min((8 if wide <= 16 else 4 if wide == 32 else 3) // blocks, tiles))
        )
        stages = min((ring_bytes // (128 * blocks) - token_stages * wide * 2) // (64 * sides * bits // 8), tiles)
        if stages >= 2:
            plans.append(
                Plan(Kind.RING, block_k=128 * blocks, splits=split, stages=stages, token_stages=max(token_stages, 2))
            )
    yield from dict.fromkeys(plans)


class Operands:
    """Random operands of a shape, to compile a plan and check its result."""

    def __init__(self, shape: Shape, tokens: int) -> None:
        self.shape = shape
        matrix = torch.randn(shape.rows, shape.k, device="cuda", dtype=torch.bfloat16) * 0.02
        self.weight = Weight(matrix) if shape.scheme is Scheme.PLAIN else _quantized(matrix, shape.scheme)
        self.x = torch.randn(tokens, shape.k, device="cuda", dtype=torch.bfloat16)
        self.norm = Norm(torch.randn(shape.k, device="cuda", dtype=torch.bfloat16), EPS)

    def run(self, plan: Plan, *, pdl: bool) -> Tensor:
        x, linear = self.x, FusedLinear(pdl=pdl)
        if self.shape.scheme in WEIGHT_ONLY:
            return self._run_quantized(PackedLinear(linear, OnePlan(plan)), linear)
        if self.shape.scheme is not Scheme.PLAIN:
            return self._run_quantized(QuantizedLinear(linear, gpu_of(x.device), OnePlan(plan)), linear)
        match self.shape.fusion:
            case Fusion.ADD:
                return linear.whole(linear.linear_add(plan, x, self.weight, self._zeros()))
            case Fusion.GATE:
                return linear.norm_gate_up(plan, Residual(x), self.norm, self.weight, Activation.SILU)
            case Fusion.NORM:
                return linear.norm_linear(plan, Residual(x), self.norm, self.weight, torch.bfloat16)
            case Fusion.LOGITS:
                return linear.norm_linear(plan, Residual(x), self.norm, self.weight, torch.float32)

    def _run_quantized(self, products: QuantizedLinear | PackedLinear, linear: FusedLinear) -> Tensor:
        match self.shape.fusion:
            case Fusion.ADD:
                return linear.whole(products.linear_add(self.x, self.weight, self._zeros()))
            case Fusion.GATE:
                return products.norm_gate_up(Residual(self.x), self.norm, self.weight, Activation.SILU)
            case _:
                return products.norm_linear(Residual(self.x), self.norm, self.weight)

    def _zeros(self) -> Residual:
        return Residual(torch.zeros(self.x.shape[0], self.shape.n, device="cuda", dtype=torch.bfloat16))

    def is_right(self, plan: Plan) -> bool:
        """Tell whether the plan can run and agrees with cuBLAS; activations as they are differ from those in codes."""
        expected = self.run(Plan(Kind.CUBLAS), pdl=False).float()
        pdl = gpu_of(self.x.device).has_dependent_launch
        try:
            error = (self.run(plan, pdl=pdl).float() - expected).norm() / expected.norm()
        except OutOfResources:
            return False
        return bool(error < (2e-2 if self.shape.scheme is Scheme.PLAIN or plan.kind is not Kind.GEMV else 6e-2))


class OnePlan(NamedTuple):
    """A source of plans that has a single one."""

    chosen: Plan

    def plan(self, fusion: Fusion, num_tokens: int, n: int, k: int, scheme: Scheme = Scheme.PLAIN) -> Plan:
        return self.chosen


def _quantized(matrix: Tensor, scheme: Scheme) -> Weight:
    if scheme in WEIGHT_ONLY:
        return _alone(matrix, scheme)
    [dtype] = [each for each, of in SCHEMES.items() if of is scheme]
    codes, scales = quantize(matrix, dtype)
    return Weight(codes, None, scales.contiguous(), matrix.dtype)


def _alone(matrix: Tensor, scheme: Scheme) -> Weight:
    """Return a matrix in a weight-only scheme, with a scale for each 128 columns of 4 bits, 32 of 8, or 16 floats."""
    if scheme is Scheme.FP4:
        return _in_floats(matrix)
    columns, largest = (128, 7) if scheme is Scheme.INT4 else (32, 127)
    groups = matrix.float().view(matrix.shape[0], -1, columns)
    scales = (groups.abs().amax(-1) / largest).half()
    codes = (groups / scales.float()[..., None]).round().flatten(1)
    data = pack((codes + 8).to(torch.uint8) if scheme is Scheme.INT4 else codes.to(torch.int8))
    return Weight(data, None, scales, matrix.dtype, is_wide=scheme is Scheme.WIDE_INT8)


def _in_floats(matrix: Tensor) -> Weight:
    """Return a matrix in floats of 4 bits, rounded to the nearest."""
    groups = matrix.float().unflatten(1, (-1, FLOAT_GROUP))
    of_all = groups.abs().amax() / (LARGEST_FLOAT * 448.0)
    scales = (groups.abs().amax(-1) / (LARGEST_FLOAT * of_all)).to(torch.float8_e4m3fn).float()
    exact = groups / (scales * of_all).clamp(min=1e-30)[..., None]
    magnitudes = torch.bucketize(exact.abs(), torch.tensor(MIDPOINTS, device=matrix.device))
    codes = float_codes((magnitudes + 8 * (exact < 0)).to(torch.uint8), scales)
    factors = of_all.expand(matrix.shape[0], 1).contiguous()
    return Weight(pack(codes.flatten(1)), None, scale_bytes(scales), matrix.dtype, factors=factors)
