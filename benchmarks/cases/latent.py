"""Latent attention at DeepSeek-V2-Lite's shapes, as decode and prompt steps run it: all work between two products."""

from collections.abc import Iterator
from itertools import starmap

import torch
from torch import Tensor

from benchmarks.cases.kernel import BLOCK_SIZE, EPS, Case, random, variants_for
from common.kernels.base.gpu import gpu_of
from common.kernels.base.latent_operands import LatentWeights
from common.ops.base import ForwardBatch, GroupCache, Ops
from common.ops.cuda_ops import CudaOps
from common.ops.torch_ops import TorchOps
from common.settings.config import KernelsSection

NUM_HEADS, RANK, NOPE, ROPE, VALUE = 16, 512, 128, 64, 128
ENTRY, QUERIES = RANK + ROPE, NUM_HEADS * (NOPE + ROPE)
SCALE = 0.1147
WEIGHT_BYTES = NUM_HEADS * (NOPE + VALUE) * RANK * 2
MODEL = "deepseek-v2-lite"
CONTEXTS = ((1, 1024), (8, 1024), (64, 1024), (1, 8192), (8, 8192), (64, 4096))  # sequences, tokens of each
PROMPTS = (  # sequences, new tokens of each, and tokens of each with those in the pool
    (1, 64, 64), (1, 512, 512), (1, 1024, 1024), (8, 128, 128), (1, 8192, 8192), (1, 16, 8192), (8, 16, 1024),
    (1, 512, 8192),
)  # fmt: skip


def weights_of(max_positions: int) -> LatentWeights:
    """Make random weights and a rotary table."""
    angles = torch.rand(max_positions, ROPE // 2, device="cuda")
    return LatentWeights(
        norm=random(RANK),
        norm_eps=EPS,
        expand=random(NUM_HEADS, NOPE + VALUE, RANK) * RANK**-0.5,
        rope=torch.cat((angles.cos(), angles.sin()), dim=1),
        nope_dim=NOPE,
        scale=SCALE,
    )


def make_batch(num_seqs: int, num_new: int, seq_len: int) -> ForwardBatch:
    """Make a batch of the last `num_new` tokens of sequences of equal length in scattered blocks."""
    num_blocks = -(-seq_len // BLOCK_SIZE)
    table = torch.randperm(num_seqs * num_blocks, device="cuda").int().view(num_seqs, -1)
    places = torch.arange(seq_len - num_new, seq_len, device="cuda")
    slots = table[:, places // BLOCK_SIZE].long() * BLOCK_SIZE + places % BLOCK_SIZE
    return ForwardBatch(
        token_ids=torch.zeros(num_seqs * num_new, dtype=torch.int32, device="cuda"),
        positions=places.int().repeat(num_seqs),
        slots=(slots.flatten(),),
        block_tables=(table,),
        seq_lens=torch.full((num_seqs,), seq_len, dtype=torch.int32, device="cuda"),
        cu_seqlens=torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda") * num_new,
        last_tokens=None,
        max_query_len=num_new,
        max_seq_len=seq_len,
        num_keys=0 if num_new == 1 else num_seqs * seq_len,
    )


def latent_case(name: str, batch: ForwardBatch, num_bytes: float, num_flops: float) -> Case:
    """Make a case of rotations, the write of latents, and attention in the form chosen for the batch."""
    num_tokens, num_variants = batch.token_ids.shape[0], variants_for(num_bytes)
    pool = random(int(batch.block_tables[0].numel()), num_variants, 1, BLOCK_SIZE, 1, ENTRY)
    weights = [weights_of(batch.max_seq_len) for _ in range(num_variants)]
    inputs = random(num_tokens, QUERIES + ENTRY)
    cache = GroupCache(pool, NUM_HEADS)
    pdl = batch.one_token_each and gpu_of(pool.device).has_dependent_launch
    ops = CudaOps([cache], KernelsSection(), batch.seq_lens.shape[0], pdl=pdl)
    batch = ops.begin(batch)

    def attend(ops: Ops, i: int, q: Tensor) -> Tensor:
        return ops.latent_attention(q, inputs[:, QUERIES:], weights[i], i, batch)

    def run(i: int) -> Tensor:
        return attend(ops, i, inputs[:, :QUERIES].clone())  # a prompt step rotates queries in place

    def expected() -> Tensor:
        return attend(TorchOps([cache]), 0, inputs[:, :QUERIES])

    return Case(name, run, expected, num_variants, num_bytes, num_flops, MODEL)


def decode_case(num_seqs: int, seq_len: int) -> Case:
    """Make a case of a decode step."""
    entries = num_seqs * seq_len
    num_bytes = WEIGHT_BYTES + entries * ENTRY * 2 + num_seqs * (QUERIES + NUM_HEADS * VALUE) * 2
    num_flops = entries * NUM_HEADS * 2 * (ENTRY + RANK)
    return latent_case(f"latent decode {num_seqs} x {seq_len}", make_batch(num_seqs, 1, seq_len), num_bytes, num_flops)


def prompt_case(num_seqs: int, num_new: int, seq_len: int) -> Case:
    """Make a case of a prompt step; operations are counted as for expanded keys and values."""
    num_keys, pairs = num_seqs * seq_len, num_seqs * num_new * (seq_len - (num_new - 1) / 2)
    num_bytes = WEIGHT_BYTES + num_keys * ENTRY * 2 + num_seqs * num_new * (QUERIES + NUM_HEADS * VALUE) * 2
    num_flops = 2 * NUM_HEADS * (pairs * (NOPE + ROPE + VALUE) + num_keys * RANK * (NOPE + VALUE))
    name = f"latent prompt {num_seqs} x {num_new}" + (f" of {seq_len}" if seq_len > num_new else "")
    return latent_case(name, make_batch(num_seqs, num_new, seq_len), num_bytes, num_flops)


def latent_cases() -> Iterator[Case]:
    """Yield cases lazily, because the buffers of all cases would not fit at once."""
    yield from starmap(decode_case, CONTEXTS)
    yield from starmap(prompt_case, PROMPTS)
