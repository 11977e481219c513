"""Compiles every kernel for GPUs that are not there: `python -m tests.kernels.offline 8.0 9.0` prints a line a kernel.

Triton's compiler needs no GPU. Steps run as they would in a worker, with the tiles and plans that it would choose
there, on tensors without memory; where a kernel would be launched it is compiled, down to the binary. A line is JSON:
capability, kernel, and the shared memory that a program of it takes, in bytes.
"""

import json
import os
import sys
from dataclasses import replace
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before triton is imported

import torch
from torch import Tensor

from common.base.dtypes import DTYPES
from common.base.routing import Route, Score
from common.device.ahead.absent_gpu import META, cards_of, compile_instead_of_launching, pretend
from common.device.steps.adjustments import Adjustments, num_mask_words
from common.device.steps.output_ring import make_logprob_ring
from common.device.steps.row_state import RowLayout
from common.device.steps.warm_up import sampling_tensors
from common.kernels.base.attention_operands import AttentionWeights, SharedPrefixes
from common.kernels.base.gpu import Gpu
from common.kernels.base.row_operands import RowUpdates
from common.kernels.base.sampling_operands import GrammarMasks, TokenRing
from common.kernels.elementwise.embedding import embedding
from common.kernels.elementwise.gather_blocks import gather_blocks
from common.kernels.elementwise.row_slots import row_slots
from common.kernels.elementwise.update_rows import RowUpdater
from common.kernels.products.join_parts import join_parts
from common.kernels.sampling import sampling
from common.kernels.sampling.adjust_logits import adjust_logits
from common.kernels.sampling.logprobs import land_logprobs, logprobs
from common.models.decoder import Decoder
from common.models.layers.delta_rule import DeltaPart
from common.models.sizes.attention import Heads
from common.ops.base import (
    Activation,
    ExpertWeights,
    ForwardBatch,
    GroupCache,
    LatentWeights,
    Norm,
    Residual,
    Router,
    Routing,
    Weight,
)
from common.ops.cuda_ops import CudaOps
from common.ops.linear_plan import PromptPlans
from common.settings.config import KernelsSection
from common.wire.values.sampling_params import PADDING
from tests.support.attention_shapes import GEMMA_3_4B, GEMMA_4_31B_FULL, GPT_OSS, GPT_OSS_FULL
from tests.support.decoders import qwen3_4b, qwen3_5_4b, qwen3_30b_a3b

BF16 = torch.bfloat16
BLOCK_SIZE, NUM_BLOCKS = 16, 1000
LATENT_STEPS = ((64, 64, 0), (40, 1, 0), (200, 4, 0), (200, 4, 200), (1100, 1, 1100))  # tokens, sequences, keys known
MODEL = qwen3_4b(num_layers=2, max_positions=4096)  # of its layers as many as differ
[HEADS] = MODEL.heads


def print_kernel(capability: str, kernel: Any) -> None:
    print(json.dumps([capability, kernel.metadata.name, kernel.metadata.shared]), flush=True)


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def make_batch(num_tokens: int, num_seqs: int) -> ForwardBatch:
    is_decode = num_tokens == num_seqs
    return ForwardBatch(
        token_ids=empty(num_tokens),
        positions=empty(num_tokens),
        slots=(empty(num_tokens, dtype=torch.int64),),
        block_tables=(empty(num_seqs, 64),),
        seq_lens=empty(num_seqs),
        cu_seqlens=empty(num_seqs + 1),
        last_tokens=None if is_decode else empty(num_seqs, dtype=torch.int64),
        max_query_len=num_tokens // num_seqs,
        max_seq_len=1024,
        num_keys=0 if is_decode else num_tokens,
    )


def make_ops(heads: Heads, max_num_seqs: int, *, pdl: bool, window: int = 0, cache: torch.dtype = BF16) -> CudaOps:
    pool = empty(NUM_BLOCKS, len(MODEL.layers), 2, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim, dtype=cache)
    return CudaOps([GroupCache(pool, heads.num_q_heads, window)], KernelsSection(), max_num_seqs, pdl=pdl)


def run_model(gpu: Gpu) -> None:
    """Decode steps of few and of many rows; prompts of fewer and of more tokens than gather keys, or gate in a product.

    Their last layer is attention of few queries.
    """
    shapes = {name: stack.shape for name, stack in MODEL.stacks().items()}
    tensors = {name: empty(*shape, dtype=BF16) for name, shape in shapes.items()}
    model = Decoder(MODEL, tensors, MODEL.max_positions)
    step_ops = make_ops(HEADS, 64, pdl=gpu.has_dependent_launch)
    for num_rows in (1, 64):
        model.forward(make_batch(num_rows, num_rows), step_ops)
    prefixes = SharedPrefixes(numbers=empty(64), num_tokens=empty(64))
    model.forward(replace(make_batch(64, 64), prefixes=prefixes), step_ops)
    prompt_ops = make_ops(HEADS, 2, pdl=False)
    prompt_ops.plans = PromptPlans(prompt_ops.plans)
    for num_tokens in (32, 300, 800, 1200):
        model.forward(make_batch(num_tokens, 2), prompt_ops)


def run_quantized(gpu: Gpu) -> None:
    """A model quantized by each scheme, and products with the other forms of scales: decode steps, and prompts."""
    dtypes = DTYPES | {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
    for scheme in ("fp8", "int8"):
        config = replace(MODEL, scheme=scheme, head=scheme)
        tensors = {
            name: empty(*stack.shape, dtype=dtypes[stack.dtype or "bfloat16"])
            for name, stack in config.stacks().items()
        }
        model = Decoder(config, tensors, MODEL.max_positions)
        step_ops, prompt_ops = make_ops(HEADS, 64, pdl=gpu.has_dependent_launch), make_ops(HEADS, 2, pdl=False)
        prompt_ops.plans = PromptPlans(prompt_ops.plans)
        for num_rows in (1, 64):
            model.forward(make_batch(num_rows, num_rows), step_ops)
        model.logits(Residual(empty(130, 2560, dtype=BF16)), prompt_ops)
        for num_tokens in (3, 32, 300):
            model.forward(make_batch(num_tokens, 1), prompt_ops)
        codes, inner = dtypes[config.stacks()["layers.0.qkv"].dtype or ""], 9728
        norm, x = Norm(empty(2560, dtype=BF16), 1e-6), Residual(empty(8, 2560, dtype=BF16))
        for rows in (1, 128):
            scales = empty(2 * inner // rows, 20, dtype=torch.float32)
            weight = Weight(empty(2 * inner, 2560, dtype=codes), None, scales, BF16)
            step_ops.norm_gate_up(x, norm, weight)
            step_ops.norm_gate_up(Residual(x.rows[:1]), norm, weight)
    ops, hidden = make_ops(HEADS, 64, pdl=gpu.has_dependent_launch), 2560 + 64  # which no ring is made for
    weight = Weight(empty(128, hidden, dtype=torch.int8), None, empty(128, 1, dtype=torch.float32), BF16)
    ops.norm_linear(Residual(empty(64, hidden, dtype=BF16)), Norm(empty(hidden, dtype=BF16), 1e-6), weight)


def run_packed(gpu: Gpu) -> None:
    """Products with matrices of codes alone: in decode steps, for prompts, and of the head."""
    hidden, inner = 2560, 9728
    norm, byte = Norm(empty(hidden, dtype=BF16), 1e-6), torch.uint8
    forms = ((4, 128, False), (4, 32, True), (8, 128, False), (8, 16, True), (4, 16, False))  # the last one of floats
    for bits, group, has_offsets in forms:

        def made(rows: int, columns: int, bits: int = bits, group: int = group, has_offsets: bool = has_offsets) -> Any:
            data = empty(rows, columns // 2, dtype=byte) if bits == 4 else empty(rows, columns, dtype=torch.int8)
            is_float = (bits, group) == (4, 16)
            scales = empty(rows, columns // group, dtype=byte if is_float else torch.float16)
            factors = empty(rows, 1, dtype=torch.float32) if is_float else None
            return Weight(data, None, scales, BF16, scales if has_offsets else None, bits == 8, factors)

        for num_tokens in (1, 32, 300) if group == 128 else (1, 8, 32, 300) if (bits, group) == (4, 16) else (1, 32):
            ops = make_ops(HEADS, 64, pdl=gpu.has_dependent_launch and num_tokens < 300)
            x = Residual(empty(num_tokens, hidden, dtype=BF16))
            ops.norm_linear(x, norm, made(6144, hidden))
            ops.linear_add(empty(num_tokens, inner, dtype=BF16), made(hidden, inner), x)
            ops.norm_gate_up(x, norm, made(2 * inner, hidden))
        ops.logits(Residual(empty(1, hidden, dtype=BF16)), norm, made(20_000, hidden), 0.0)


def run_hybrid(gpu: Gpu) -> None:
    """States beside attention with heads of 256: decode steps and prompts."""
    config = qwen3_5_4b()
    tensors = {
        name: empty(*stack.shape, dtype=torch.float32 if stack.dtype else BF16)
        for name, stack in config.stacks().items()
    }
    model = Decoder(config, tensors, config.max_positions)
    pools = [empty(90, *group.block_shape, dtype=DTYPES[group.dtype]) for group in config.cache_groups(16, "bfloat16")]
    for num_rows, num_seqs in ((1, 1), (64, 64), (300, 2)):
        pdl = gpu.has_dependent_launch and num_rows == num_seqs
        caches = [GroupCache(*each) for each in zip(pools, config.q_heads, strict=True)]
        ops = CudaOps(caches, KernelsSection(), 64, pdl=pdl)
        batch = make_batch(num_rows, num_seqs)
        tables, slots = (*batch.block_tables, empty(num_seqs, 1)), (*batch.slots, *batch.slots)
        batch = replace(batch, block_tables=tables, slots=slots)
        model.forward(batch, ops)
    part = model.layers[0][0]
    assert isinstance(part, DeltaPart)
    x = empty(300, part.inputs.num_out, dtype=torch.float32)  # by token
    ops.delta_rule(x, part.delta, part.layer_id, ops.begin(batch))


def run_experts(gpu: Gpu) -> None:
    """Experts of a lone token, of few and of many tokens."""
    config = qwen3_30b_a3b()
    tensors = {name: empty(*stack.shape, dtype=BF16) for name, stack in config.stacks().items()}
    model = Decoder(config, tensors, config.max_positions)
    [heads] = config.heads
    for num_rows, num_seqs in ((1, 1), (8, 8), (64, 64), (300, 2), (1200, 2)):
        ops = make_ops(heads, 64, pdl=gpu.has_dependent_launch and num_rows == num_seqs)
        model.forward(make_batch(num_rows, num_seqs), ops)


def run_other_experts(gpu: Gpu) -> None:
    """Choices and matrices of other families: biases, groups, shared experts, MXFP4."""
    hidden, inner, num = 2880, 2880, 32
    columns = {name: empty(num, dtype=torch.float32) for name in ("bias", "selection_bias", "expert_scale")}
    byte = torch.uint8
    weights = ExpertWeights(
        gate_up=empty(num + 1, 2 * inner, hidden // 2, dtype=byte),
        down=empty(num + 1, hidden, inner // 2, dtype=byte),
        activation=Activation.CLAMPED_SWIGLU,
        gate_up_bias=empty(num + 1, 2 * inner, dtype=BF16),
        down_bias=empty(num + 1, hidden, dtype=BF16),
        gate_up_scales=empty(num + 1, 2 * inner, hidden // 32, dtype=byte),
        down_scales=empty(num + 1, hidden, inner // 32, dtype=byte),
    )
    sizes = (
        (1, Score.SIGMOID),
        (8, Score.SOFTMAX),
        (300, Score.SIGMOID),
        (1200, Score.SIGMOID),
        (5000, Score.SIGMOID),
    )
    for num_tokens, score in sizes:
        rule = Route(4, score, groups=8, kept_groups=4 if num_tokens == 1 else 8, group_best=2)
        router = Router(empty(num + 1, hidden, dtype=BF16), rule, num, 1, **columns)
        ops = make_ops(HEADS, 64, pdl=gpu.has_dependent_launch and num_tokens < 64)
        rows, norm = Residual(empty(num_tokens, hidden, dtype=BF16)), Norm(empty(hidden, dtype=BF16), 1e-6)
        x, routing = ops.norm_route(rows, norm, router, empty(num_tokens))
        ops.experts_add(x, routing, weights, rows)


def run_experts_in_codes(gpu: Gpu) -> None:
    """Experts of Qwen3-30B-A3B in blocks of FP8 and in rows of INT8; of blocks that begin inside an expert, by row."""
    hidden, inner, num, e4m3 = 2048, 768, 128, torch.float8_e4m3fn
    for codes, rows, columns in ((e4m3, 128, 128), (torch.int8, 1, 0), (e4m3, 1, 128)):
        groups = [-(-width // columns) if columns else 1 for width in (hidden, inner)]
        weights = ExpertWeights(
            gate_up=empty(num, 2 * inner, hidden, dtype=codes),
            down=empty(num, hidden, inner, dtype=codes),
            activation=Activation.SILU,
            gate_up_scales=empty(num, 2 * inner // rows, groups[0], dtype=torch.float32),
            down_scales=empty(num, hidden // rows, groups[1], dtype=torch.float32),
        )
        for num_tokens in (1, 8, 300, 1200, 5000) if columns else (1, 8, 1200):
            ops = make_ops(HEADS, 64, pdl=gpu.has_dependent_launch and num_tokens < 64)
            routing = Routing(empty(num_tokens, 8), empty(num_tokens, 8, dtype=torch.float32))
            x = empty(num_tokens, hidden, dtype=BF16)
            ops.experts_add(x, routing, weights, Residual(empty(num_tokens, hidden, dtype=BF16)))


def run_experts_in_integers(gpu: Gpu) -> None:
    """Experts of Qwen3-30B-A3B in codes of 4 bits; for Hopper those in groups as most checkpoints have them."""
    hidden, inner, num, byte = 2048, 768, 128, torch.uint8
    forms = [(128, False, (1, 8, 1200)), (128, True, (8,))]
    for group, has_offsets, sizes in forms if gpu.is_hopper else [*forms, (32, True, (1, 8, 300, 1200))]:
        dtype = torch.float32 if has_offsets else torch.float16
        scales = [empty(num, 2 * inner, hidden // group, dtype=dtype), empty(num, hidden, inner // group, dtype=dtype)]
        weights = ExpertWeights(
            gate_up=empty(num, 2 * inner, hidden // 2, dtype=byte),
            down=empty(num, hidden, inner // 2, dtype=byte),
            activation=Activation.SILU,
            gate_up_scales=scales[0],
            down_scales=scales[1],
            gate_up_offsets=scales[0] if has_offsets else None,
            down_offsets=scales[1] if has_offsets else None,
        )
        for num_tokens in sizes:
            ops = make_ops(HEADS, 64, pdl=gpu.has_dependent_launch and num_tokens < 64)
            routing = Routing(empty(num_tokens, 8), empty(num_tokens, 8, dtype=torch.float32))
            x = empty(num_tokens, hidden, dtype=BF16)
            ops.experts_add(x, routing, weights, Residual(empty(num_tokens, hidden, dtype=BF16)))


def run_attention(
    gpu: Gpu, heads: Heads, *, shares_prefixes: bool = False, cache: torch.dtype = BF16, **given: Any
) -> None:
    """Attention that differs from that of `run_model`: decode steps, and prompts for each kernel of theirs."""
    weights = AttentionWeights(
        q_norm=None,
        k_norm=None,
        norm_eps=1e-6,
        rope=empty(4096, heads.head_dim, dtype=torch.float32),
        scale=heads.head_dim**-0.5,
        **heads._asdict(),
        **given,
    )
    prefixes = SharedPrefixes(numbers=empty(64), num_tokens=empty(64)) if shares_prefixes else None
    for num_tokens, num_seqs in ((64, 64), (40, 1), (200, 4), (1100, 1)):
        is_decode = num_tokens == num_seqs
        pdl = gpu.has_dependent_launch and is_decode
        ops = make_ops(heads, num_seqs, pdl=pdl, window=weights.window, cache=cache)
        batch = make_batch(num_tokens, num_seqs)
        batch = replace(batch, num_keys=0 if is_decode else 5000, prefixes=prefixes if is_decode else None)
        qkv = empty(num_tokens, weights.num_heads * heads.head_dim, dtype=BF16)
        ops.attention(qkv, weights, 0, ops.begin(batch))


def run_large_heads(gpu: Gpu) -> None:
    """Heads whose tiles are the largest, and heads whose attention is never fused."""
    run_attention(gpu, Heads(16, 4, 256))
    run_attention(gpu, Heads(16, 4, 32))
    run_attention(gpu, Heads(*GEMMA_4_31B_FULL[:3]), norms_values=True, shares_kv=True)


def run_other_attention(gpu: Gpu) -> None:
    """Windows, sinks, factors of queries, and values that are normed, or keys."""
    for seeing in (GPT_OSS, GPT_OSS_FULL, GEMMA_3_4B):
        heads = Heads(*seeing[:3])
        sinks = empty(heads.num_q_heads, dtype=torch.float32) if seeing.has_sinks else None
        run_attention(gpu, heads, window=seeing.window, sinks=sinks, shares_prefixes=not seeing.window)
    factors = empty(4096, dtype=torch.float32)
    run_attention(gpu, Heads(32, 8, 128), query_factors=factors, shares_prefixes=True)
    run_attention(gpu, Heads(8, 2, 128), norms_values=True, shares_kv=True)


def run_e4m3(gpu: Gpu) -> None:
    """Attention over keys and values in e4m3, with the largest tiles, a window, sinks, and shared prefixes."""
    cache = torch.float8_e4m3fn
    run_attention(gpu, Heads(32, 8, 128), cache=cache, shares_prefixes=True)
    run_attention(gpu, Heads(16, 4, 256), cache=cache, norms_values=True)
    run_attention(gpu, Heads(*GEMMA_4_31B_FULL[:3]), cache=cache)
    sinks = empty(GPT_OSS.num_q, dtype=torch.float32)
    run_attention(gpu, Heads(*GPT_OSS[:3]), cache=cache, window=GPT_OSS.window, sinks=sinks)


def run_other_products(gpu: Gpu) -> None:
    """Gates other than SiLU, and biases behind attention."""
    ops, (inner, hidden) = make_ops(HEADS, 64, pdl=gpu.has_dependent_launch), (9728, 2560)
    norm, gate_up = Norm(empty(hidden, dtype=BF16), 1e-6), Weight(empty(2 * inner, hidden, dtype=BF16))
    out = Weight(empty(hidden, 4096, dtype=BF16), empty(hidden, dtype=BF16))
    for num_tokens in (1, 64, 1200):
        x = Residual(empty(num_tokens, hidden, dtype=BF16))
        for activation in (Activation.GELU_TANH, Activation.CLAMPED_SWIGLU):
            ops.norm_gate_up(x, norm, gate_up, activation)
        ops.linear_add(empty(num_tokens, 4096, dtype=BF16), out, x)


def run_gemma(gpu: Gpu) -> None:
    """What Gemma computes beside attention, at the sizes of Gemma 4 12B: decode steps, and prompts."""
    hidden, inner, vocab = 3840, 15360, 262_144
    table, norm = Weight(empty(vocab, hidden, dtype=BF16)), Norm(empty(hidden, dtype=BF16), 1e-6)
    gate_up, down = Weight(empty(2 * inner, hidden, dtype=BF16)), Weight(empty(hidden, inner, dtype=BF16))
    out, scale = Weight(empty(hidden, 4096, dtype=BF16)), empty(1, dtype=torch.float32)
    for num_tokens in (1, 64, 300, 1200):
        ops = make_ops(HEADS, num_tokens, pdl=gpu.has_dependent_launch and num_tokens <= 64)
        x = ops.embed(empty(num_tokens), table, 62.0)
        x = ops.linear_norm_add(empty(num_tokens, 4096, dtype=BF16), out, norm, x)
        x = ops.linear_norm_add(ops.norm_gate_up(x, norm, gate_up, Activation.GELU_TANH), down, norm, x, scale)
        ops.logits(x, norm, table, 30.0)


def run_gemma_experts(gpu: Gpu) -> None:
    """Experts of Gemma 4 26B-A4B, whose sum is normed before it is added."""
    hidden, inner, num = 2816, 704, 128
    weights = ExpertWeights(
        gate_up=empty(num, 2 * inner, hidden, dtype=BF16),
        down=empty(num, hidden, inner, dtype=BF16),
        activation=Activation.GELU_TANH,
    )
    scale, norm = empty(num, dtype=torch.float32), Norm(empty(hidden, dtype=BF16), 1e-6)
    router = Router(empty(num, hidden, dtype=BF16), Route(8, logit_scale=hidden**-0.5), num, expert_scale=scale)
    for num_tokens in (1, 64, 1200):
        ops = make_ops(HEADS, num_tokens, pdl=gpu.has_dependent_launch and num_tokens <= 64)
        x = Residual(empty(num_tokens, hidden, dtype=BF16))
        normed, routing = ops.norm_route(x, norm, router, empty(num_tokens))
        x = ops.norm_add(ops.experts_norm_add(normed, routing, weights, norm, x).rows, norm, x, scale[:1])


def run_latent(gpu: Gpu) -> None:
    """Latent attention with the heads of DeepSeek-V2-Lite and of DeepSeek-V3; few tokens of a prompt, and many."""
    for num_heads in (16, 128):
        weights = LatentWeights(
            norm=empty(512, dtype=BF16),
            norm_eps=1e-6,
            expand=empty(num_heads, 256, 512, dtype=BF16),
            rope=empty(4096, 64, dtype=torch.float32),
            nope_dim=128,
            scale=0.1,
            query_factors=None if num_heads == 16 else empty(4096, dtype=torch.float32),
        )
        pool = empty(NUM_BLOCKS, 2, 1, BLOCK_SIZE, 1, 576, dtype=BF16)
        for num_tokens, num_seqs, num_keys in LATENT_STEPS[: len(LATENT_STEPS) if num_heads == 16 else 1]:
            pdl = gpu.has_dependent_launch and num_tokens == num_seqs
            ops = CudaOps([GroupCache(pool, num_heads)], KernelsSection(), 64, pdl=pdl)
            batch = ops.begin(replace(make_batch(num_tokens, num_seqs), num_keys=num_keys))
            q, kv = empty(num_tokens, num_heads * 192, dtype=BF16), empty(num_tokens, 576, dtype=BF16)
            ops.latent_attention(q, kv, weights, 0, batch)
            if batch.last_tokens is not None:
                ops.latent_attention_of_last(q, kv, weights, 0, batch)


def run_odd_shape(gpu: Gpu) -> None:
    """A product that `ring_gemm` is not made for: what Hopper does as others do."""
    ops, hidden = make_ops(HEADS, 64, pdl=gpu.has_dependent_launch), 2560 + 64
    rows, norm, weight = empty(64, hidden, dtype=BF16), empty(hidden, dtype=BF16), empty(9728, hidden, dtype=BF16)
    for activation in (Activation.SILU, Activation.GELU_TANH):
        ops.norm_gate_up(Residual(rows), Norm(norm, 1e-6), Weight(weight), activation)


def run_sampler(rows: int, *, pdl: bool) -> None:
    """The end of a decode step."""
    columns = (empty(rows), empty(rows), empty(rows))
    ring = TokenRing(torch.zeros((rows, 3), dtype=torch.int32), torch.zeros(rows, dtype=torch.int32))
    logits = empty(rows, MODEL.vocab_size, dtype=torch.float32)
    params, workspace = sampling_tensors([PADDING] * rows, META), sampling.make_workspace(rows, MODEL.vocab_size, META)
    sampling.sample_and_advance(logits, params, *columns, 1024, ring, workspace, pdl=pdl)


def run_rest(gpu: Gpu) -> None:
    """What is launched around the model."""
    for rows in (8, 64):
        run_sampler(rows, pdl=gpu.has_dependent_launch)
    rows, pdl = 8, gpu.has_dependent_launch
    params, state = sampling_tensors([PADDING] * rows, META), RowLayout(rows, rows * 64).make_state(META)
    ring = TokenRing(torch.zeros((rows, 3), dtype=torch.int32), torch.zeros(rows, dtype=torch.int32))
    logits = empty(rows, MODEL.vocab_size, dtype=torch.float32)
    adjustments, mask_words = Adjustments(rows, MODEL.vocab_size, META).tensors, num_mask_words(MODEL.vocab_size)
    on_host = (torch.zeros(shape, dtype=torch.int32) for shape in ((9, mask_words), (9,), (rows,)))
    for grammars in (None, GrammarMasks(*on_host)):
        adjust_logits(
            logits, params, state.state_slots, adjustments, state.token_ids, state.seq_lens, grammars, pdl=pdl
        )
    logprobs(logits, params.num_logprobs, state.token_ids, pdl=pdl)
    land_logprobs(logits, params.num_logprobs, state.token_ids, make_logprob_ring(ring), pdl=pdl)
    row_slots(state.positions, state.seq_lens, state.block_tables.view(rows, 64), BLOCK_SIZE, pdl=pdl)
    RowUpdater(state)(RowUpdates(empty(100), 4, 9))
    gather_blocks(1 << 40, empty(5), empty(10, 4096, dtype=torch.uint8), empty(5))
    embedding(state.token_ids, empty(MODEL.vocab_size, 2560, dtype=BF16), pdl=pdl)
    parts, whole = empty(4, rows, 2560, dtype=torch.float32), empty(rows, 2560, dtype=BF16)
    join_parts(parts, whole, pdl=pdl)


def main(capabilities: list[str]) -> None:
    current = ""
    compile_instead_of_launching(lambda kernel: print_kernel(current, kernel))
    for current in capabilities:
        card = cards_of(current)[0]
        pretend(card)
        gpu = card.gpu
        run_model(gpu)
        run_quantized(gpu)
        run_packed(gpu)
        run_large_heads(gpu)
        run_other_attention(gpu)
        run_e4m3(gpu)
        run_other_products(gpu)
        run_hybrid(gpu)
        run_experts(gpu)
        run_other_experts(gpu)
        run_experts_in_codes(gpu)
        run_experts_in_integers(gpu)
        run_gemma(gpu)
        run_gemma_experts(gpu)
        run_latent(gpu)
        if gpu.is_hopper:
            run_odd_shape(gpu)
        run_rest(gpu)


if __name__ == "__main__":
    with torch.inference_mode():
        main(sys.argv[1:])
