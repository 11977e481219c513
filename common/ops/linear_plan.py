"""Choice of the kernel and tiles for each product with a weight matrix: measured per GPU type, kept as data.

`plans/<gpu>.json` is written by `benchmarks/tune_linear.py`, which times every candidate among its neighbours in a
decode step. For an unknown GPU, shape or scheme, a rule of thumb decides.
"""

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Protocol, TypedDict

from common.base.json_file import JsonObject
from common.kernels.base.gpu import Gpu
from common.ops.base import Scheme
from common.ops.base.weight import WEIGHT_ONLY

PLANS = Path(__file__).parent / "plans"
MAX_SKINNY_TOKENS = 64
MAX_PACKED_TOKENS = 32  # beyond, each program would read more of the tokens than of weights
MAX_PACKED_RING_TOKENS = 256  # beyond, it takes less time to write the matrix in 16 bits
SHORT_STEPS = (16, 32, 64)  # tokens of captured graphs of short prompt steps
MIN_GATED_TOKENS = 1024  # with fewer, programs of `gated_gemm` have too few tiles to end together
RING_ROWS, RING_BLOCK_K = 64, 128  # of a tile of weights
CODES_RING_BYTES = 74_000  # of a ring of codes
PACKED_RING_BYTES = 110_000  # of both rings of `packed_ring`, of which a multiprocessor holds two
PACKED_PARTS_BYTES = 75_000  # where K is split over many such rings
MIN_PART_COLUMNS = 640  # of a part of K
MIN_WIDE_PART_COLUMNS = 512  # the same of codes of 8 bits
MAX_UNROLLED_COLUMNS = 12_288  # of a lone token and codes of 8 bits by a few warps, which have code for each tile


class Fusion(StrEnum):
    """Computation fused around a product."""

    NORM = "norm"  # norm before
    ADD = "add"  # residual after
    GATE = "gate"  # norm before, SiLU(gate) * up after
    LOGITS = "logits"  # norm before, fp32 out


class Kind(StrEnum):
    GEMV = "gemv"
    SKINNY = "skinny"
    RING = "ring"
    GATED = "gated"  # for GATE alone
    PACKED = "packed"  # for weight-only schemes alone
    CUBLAS = "cublas"  # of a matrix that is widened before, in such a scheme


class GemvTiles(TypedDict):
    """Arguments of `gemv`."""

    rows: int
    warps: int
    unroll: int
    stages: int


class SkinnyTiles(TypedDict):
    """Arguments of `skinny_gemm`."""

    block_n: int
    block_k: int
    stages: int
    warps: int


class RingTiles(TypedDict):
    """Arguments of `ring_gemm`."""

    block_k: int
    stages: int


class PackedTiles(TypedDict):
    """Arguments of `packed_gemm`."""

    rows: int
    warps: int
    stages: int


class PackedRingTiles(TypedDict):
    """Arguments of `packed_ring`."""

    block_k: int
    stages: int
    token_stages: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A kernel and its tile sizes; sizes unused by the kind are 0."""

    kind: Kind
    rows: int = 0
    unroll: int = 0
    block_n: int = 0
    block_k: int = 0
    splits: int = 0
    stages: int = 0
    warps: int = 0
    token_stages: int = 0

    @property
    def gemv_tiles(self) -> GemvTiles:
        return {"rows": self.rows, "warps": self.warps, "unroll": self.unroll, "stages": self.stages}

    @property
    def skinny_tiles(self) -> SkinnyTiles:
        return {"block_n": self.block_n, "block_k": self.block_k, "stages": self.stages, "warps": self.warps}

    @property
    def packed_tiles(self) -> PackedTiles:
        return {"rows": self.rows, "warps": self.warps, "stages": self.stages}

    @property
    def ring_tiles(self) -> RingTiles:
        return {"block_k": self.block_k, "stages": self.stages}

    @property
    def packed_ring_tiles(self) -> PackedRingTiles:
        return {"block_k": self.block_k, "stages": self.stages, "token_stages": self.token_stages}


@dataclass(frozen=True, slots=True)
class _Entry:
    max_tokens: int
    plan: Plan


class Plans(Protocol):
    """Source of plans: says how to run each product."""

    def plan(self, fusion: Fusion, num_tokens: int, n: int, k: int, scheme: Scheme = Scheme.PLAIN) -> Plan:
        """Return the plan for `num_tokens` times `[n, k]`; with GATE, `n` counts outputs, not rows."""
        ...


class LinearPlans:
    """Measured plans for a GPU type, with the rule of thumb for the rest."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._measured = _read_plans(plan_file(gpu.name))

    def plan(self, fusion: Fusion, num_tokens: int, n: int, k: int, scheme: Scheme = Scheme.PLAIN) -> Plan:
        """Return the plan for `num_tokens` times `[n, k]`; with GATE, `n` counts outputs, not rows."""
        for entry in self._measured.get((fusion, n, k, scheme), ()):
            if num_tokens <= entry.max_tokens:
                return entry.plan
        return rule_of_thumb(fusion, num_tokens, n, k, self._gpu, scheme)


@dataclass(frozen=True, slots=True)
class PromptPlans:
    """Plans for prompt steps: `plans` where a step replays a graph, and for one token or many.

    Other steps of a few tokens use cuBLAS, which takes any number of tokens. So only few kernels are compiled for the
    products of short steps.
    """

    plans: Plans

    def plan(self, fusion: Fusion, num_tokens: int, n: int, k: int, scheme: Scheme = Scheme.PLAIN) -> Plan:
        is_odd = 1 < num_tokens <= MAX_SKINNY_TOKENS and num_tokens not in SHORT_STEPS
        return Plan(Kind.CUBLAS) if is_odd else self.plans.plan(fusion, num_tokens, n, k, scheme)


def plan_file(gpu_name: str) -> Path:
    """Return the file with the plans of a GPU type: `NVIDIA H200` -> `plans/nvidia_h200.json`."""
    return PLANS / f"{re.sub(r'[^a-z0-9]+', '_', gpu_name.lower())}.json"


def rule_of_thumb(fusion: Fusion, num_tokens: int, n: int, k: int, gpu: Gpu, scheme: Scheme = Scheme.PLAIN) -> Plan:
    """Return an acceptable plan without measurements: GEMV for one token, work for every SM for a few, cuBLAS above.

    On Hopper, the product itself applies the gate for many tokens of plain elements.
    """
    if scheme in WEIGHT_ONLY:
        bits = WEIGHT_ONLY[scheme]
        if gpu.is_hopper and 1 < num_tokens <= MAX_PACKED_RING_TOKENS:
            return _packed_ring_of_thumb(fusion, num_tokens, n, k, gpu.num_sms, bits)
        if num_tokens > MAX_PACKED_TOKENS:
            return Plan(Kind.CUBLAS)
        return packed_of_thumb(fusion, num_tokens, n, k, gpu.num_sms, bits)
    if num_tokens == 1:
        return _gemv_of_thumb(fusion, scheme)
    if num_tokens > MAX_SKINNY_TOKENS:
        is_gated = fusion is Fusion.GATE and gpu.is_hopper and num_tokens >= MIN_GATED_TOKENS and n % 8 == k % 8 == 0
        return Plan(Kind.GATED if is_gated and scheme is Scheme.PLAIN else Kind.CUBLAS)
    if gpu.is_hopper and k % RING_BLOCK_K == 0:
        return _ring_of_thumb(fusion, num_tokens, n, k, gpu.num_sms, scheme)
    return _skinny_of_thumb(fusion, n, k, gpu.num_sms)


def _gemv_of_thumb(fusion: Fusion, scheme: Scheme) -> Plan:
    """Return a plan with programs of one warp, or four for the widest products; registers limit the loads ahead."""
    if scheme is not Scheme.PLAIN:
        is_add = fusion is Fusion.ADD
        return Plan(Kind.GEMV, rows=8 if is_add else 16, warps=4, stages=16 if is_add else 5)
    rows, warps, stages = {Fusion.GATE: (2, 4, 5), Fusion.LOGITS: (4, 4, 3)}.get(fusion, (2, 1, 5))
    return Plan(Kind.GEMV, rows=rows, warps=warps, unroll=1, stages=stages)


def packed_of_thumb(fusion: Fusion, num_tokens: int, n: int, k: int, num_sms: int, bits: int) -> Plan:
    """Return a plan for codes: for a lone token low programs, where there is no gate of four warps.

    Without a norm they hold most of their codes on the way; of 8 bits with a norm as many bytes as of 4. For more
    tokens, which each program reads, programs are taller.
    """
    if num_tokens == 1:
        rows, warps = 32 if fusion in (Fusion.NORM, Fusion.LOGITS) else 16, 2 if fusion is Fusion.GATE else 4
        if bits == 8:
            rows, warps = 16, 8 if k > MAX_UNROLLED_COLUMNS else 4 if fusion is Fusion.ADD else 2
        stages = 10 if fusion is Fusion.ADD or bits == 8 else 5
        return Plan(Kind.PACKED, rows=rows, splits=1, stages=stages, warps=warps)
    rows, splits = 32, 1
    while fusion is Fusion.ADD and -(-n // rows) * splits < num_sms and k // splits >= 1024:
        splits *= 2
    return Plan(Kind.PACKED, rows=rows, splits=splits, stages=3 if num_tokens <= 16 else 2, warps=4)


def _packed_ring_of_thumb(fusion: Fusion, num_tokens: int, n: int, k: int, num_sms: int, bits: int) -> Plan:
    """Return a plan with wide slots, and two programs for each multiprocessor.

    Programs are small if K may be split, and a little more and smaller with codes of 8 bits.
    """
    tokens, sides = min(max(8, 1 << (num_tokens - 1).bit_length()), RING_ROWS), 2 if fusion is Fusion.GATE else 1
    programs, splits, is_wide = -(-n // RING_ROWS) * -(-num_tokens // tokens), 1, bits == 8
    block_k, token_stages = 2 * RING_BLOCK_K, 4 if tokens <= 16 else 2
    ring_bytes = (
        PACKED_PARTS_BYTES if fusion is Fusion.ADD or (is_wide and fusion is not Fusion.GATE) else PACKED_RING_BYTES
    )
    if fusion is Fusion.ADD:
        most, columns = (5 * num_sms // 2, MIN_WIDE_PART_COLUMNS) if is_wide else (2 * num_sms, MIN_PART_COLUMNS)
        splits = max(1, min(most // programs, k // columns))
    if is_wide and fusion in (Fusion.ADD, Fusion.GATE):
        block_k, token_stages = RING_BLOCK_K, 3 if tokens == RING_ROWS else 2 * token_stages
    elif fusion is Fusion.ADD and tokens == RING_ROWS:  # wide slots would leave no room for codes
        block_k, token_stages = RING_BLOCK_K, 3
    stages = (ring_bytes // block_k - token_stages * tokens * 2) // (RING_ROWS * sides * bits // 8)
    stages = max(2, min(stages, -(-k // (block_k * splits))))
    return Plan(Kind.RING, block_k=block_k, splits=splits, stages=stages, token_stages=token_stages)


def _skinny_of_thumb(fusion: Fusion, n: int, k: int, num_sms: int) -> Plan:
    """Return a plan with two programs for each SM, if K may be split and is long enough."""
    block_n, block_k, splits = 32, 128, 1
    programs = -(-n // block_n)
    while fusion is Fusion.ADD and splits < 8 and programs * splits < 2 * num_sms and k // (2 * splits) >= 4 * block_k:
        splits *= 2
    return Plan(Kind.SKINNY, block_n=block_n, block_k=block_k, splits=splits, stages=4, warps=4)


def _ring_of_thumb(fusion: Fusion, num_tokens: int, n: int, k: int, num_sms: int, scheme: Scheme) -> Plan:
    """Return a plan with a deep ring on more than half of the SMs, or several shallower rings an SM."""
    if scheme is not Scheme.PLAIN:
        return _ring_of_codes(fusion, num_tokens, n, k, num_sms)
    programs, splits, tiles = -(-n // RING_ROWS), 1, k // RING_BLOCK_K
    while fusion is Fusion.ADD and 2 * programs * splits <= num_sms and tiles % (2 * splits) == 0:
        splits *= 2
    ring_bytes = 160_000 if programs * splits <= num_sms else 70_000
    rows = RING_ROWS * (2 if fusion is Fusion.GATE else 1) + max(8, 1 << (num_tokens - 1).bit_length())
    stages = min(ring_bytes // (rows * RING_BLOCK_K * 2), tiles // splits)
    return Plan(Kind.RING, block_k=RING_BLOCK_K, splits=splits, stages=max(stages, min(2, tiles // splits)))


def _ring_of_codes(fusion: Fusion, num_tokens: int, n: int, k: int, num_sms: int) -> Plan:
    """Return a plan with rings of which a multiprocessor holds those of two kernels, and work for each."""
    programs, splits, tiles = -(-n // RING_ROWS), 1, k // RING_BLOCK_K
    while fusion is Fusion.ADD and programs * splits < num_sms and tiles % (2 * splits) == 0:
        splits *= 2
    rows = RING_ROWS * (2 if fusion is Fusion.GATE else 1) + max(8, 1 << (num_tokens - 1).bit_length())
    stages = min(CODES_RING_BYTES // (rows * RING_BLOCK_K), tiles // splits)
    return Plan(Kind.RING, block_k=RING_BLOCK_K, splits=splits, stages=max(stages, min(2, tiles // splits)))


def element_bytes(scheme: Scheme) -> int:
    """Return the bytes of an element of a matrix, in tiles."""
    return 2 if scheme is Scheme.PLAIN else 1


@cache
def _read_plans(path: Path) -> dict[tuple[str, int, int, str], list[_Entry]]:
    if not path.exists():
        return {}
    entries: dict[tuple[str, int, int, str], list[_Entry]] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["plans"]:
        tiles: JsonObject = row["tiles"]
        entry = _Entry(row["max_tokens"], Plan(Kind(row["kind"]), **tiles))
        key = (row["fusion"], row["n"], row["k"], row.get("scheme", Scheme.PLAIN))
        entries.setdefault(key, []).append(entry)
    for rows in entries.values():
        rows.sort(key=lambda entry: entry.max_tokens)
    return entries
