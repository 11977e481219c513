"""Gated delta rule of prompt steps at the shapes of Qwen3.5-4B and Qwen3.6-27B: whole, and each kernel.

Bytes and FLOPs are a floor: what lies between two kernels of a case is not counted.
"""

from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.cases.kernel import Case, random, variants_for
from common.kernels.base.delta_operands import DeltaWeights, Sequences
from common.kernels.base.gpu import gpu_of
from common.kernels.delta.chunk_overlaps import CHUNK, find_overlaps
from common.kernels.delta.chunk_scan import scan_chunks
from common.kernels.delta.gated_norm import gated_norm
from common.kernels.delta.prompt_convolution import convolve_prompts
from common.kernels.delta.recurrence import recur
from common.ops import delta_rule as law

VALUE_HEADS = {"qwen3.5-4b": 32, "qwen3.6-27b": 48}
NUM_KEY_HEADS, DIM, WIDTH = 16, 128, 4  # of all models
LENGTHS = (1024, 8192)


def make_weights(num_heads: int) -> DeltaWeights:
    channels = (2 * NUM_KEY_HEADS + num_heads) * DIM
    return DeltaWeights(
        conv=torch.randn(channels, 1, WIDTH, device="cuda") * 0.4,
        decay=torch.rand(num_heads, device="cuda").mul(4).add(0.1).log(),
        dt_bias=torch.randn(num_heads, device="cuda"),
        norm=torch.rand(DIM, device="cuda") + 0.5,
        norm_eps=1e-6,
        num_key_heads=NUM_KEY_HEADS,
        num_value_heads=num_heads,
        key_dim=DIM,
        value_dim=DIM,
        group=0,
    )


class Prompt:
    """A prompt of `num_tokens` tokens that a layer computes from the first on, with `variants` inputs."""

    def __init__(self, model: str, num_tokens: int) -> None:
        self.model, self.num_tokens = model, num_tokens
        self.weights = weights = make_weights(VALUE_HEADS[model])
        num_heads, channels = weights.num_value_heads, weights.conv.shape[0]
        self.row = channels + weights.value_width + 2 * num_heads
        self.xs = random(variants_for(num_tokens * self.row * 2), num_tokens, self.row)
        num_rows = num_heads + -(-channels * WIDTH // (DIM * DIM)) + 1
        self.states = torch.zeros(1, num_rows, DIM * DIM, device="cuda")
        lengths = torch.tensor([0, num_tokens], dtype=torch.int32, device="cuda")
        is_new = torch.ones(1, dtype=torch.bool, device="cuda")
        self.sequences = Sequences(torch.zeros_like(lengths[:1])[:, None], lengths, lengths[1:], is_new, False)
        self.gpu = gpu_of(self.xs.device)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of a state's matrices, written once; a prompt from the first token on reads none."""
        return self.weights.num_value_heads * DIM * DIM * 4

    def case(
        self, name: str, run: Callable[[int], Tensor], expected: Callable[[], Tensor], num_bytes: int, flops: float = 0
    ) -> Case:
        name = f"{name} {self.model} {self.num_tokens}"
        return Case(name, run, expected, len(self.xs), num_bytes, flops, self.model)

    def convolved(self, i: int) -> tuple[Tensor, Tensor]:
        return convolve_prompts(self.xs[i], self.weights, self.states, self.sequences)

    def by_chunks(self, heads: Tensor, gates: Tensor) -> Tensor:
        overlaps = find_overlaps(heads, gates, self.weights, self.sequences)
        return scan_chunks(heads, overlaps, self.weights, self.states, self.sequences, self.gpu)

    def by_token(self, heads: Tensor, gates: Tensor) -> Tensor:
        return recur(heads, gates, self.weights, self.states, self.sequences)

    def normed(self, o: Tensor, i: int) -> Tensor:
        return gated_norm(o, self.xs[i], self.weights, self.sequences)

    def split(self, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of each value head `[num_tokens, value_heads, DIM]` in fp32."""
        num_heads = self.weights.num_value_heads
        q, k, v = heads.float().split([NUM_KEY_HEADS, NUM_KEY_HEADS, num_heads], dim=1)
        q, k = (each.repeat_interleave(num_heads // NUM_KEY_HEADS, dim=1) for each in (q, k))
        return q, k, v


def whole_cases(prompt: Prompt) -> Iterator[Case]:
    """Yield all that a layer does between its two products, by chunks and by token."""
    num_bytes = prompt.num_tokens * (prompt.row + prompt.weights.value_width) * 2 + prompt.state_bytes

    def expected() -> Tensor:
        q, k, v = prompt.split(expected_heads(prompt))
        gates = prompt.convolved(0)[1]
        start = torch.zeros(v.shape[1], DIM, DIM, device="cuda")
        return expected_norm(prompt, law.advance(q, k, v, gates[..., 0], gates[..., 1], start)[0])

    for name, mix in (("delta by chunks", prompt.by_chunks), ("delta by token", prompt.by_token)):

        def run(i: int, mix: Callable[[Tensor, Tensor], Tensor] = mix) -> Tensor:
            return prompt.normed(mix(*prompt.convolved(i)), i)

        yield prompt.case(name, run, expected, num_bytes, scan_flops(prompt) + overlap_flops(prompt))


def kernel_cases(prompt: Prompt) -> Iterator[Case]:
    """Yield each part: convolution, overlaps of chunks, scan, and the recurrence in place of both; gated norm."""
    num_tokens, weights = prompt.num_tokens, prompt.weights
    num_heads, channels = weights.num_value_heads, weights.conv.shape[0]
    heads, gates = prompt.convolved(0)
    overlaps = find_overlaps(heads, gates, weights, prompt.sequences)
    gate_bytes, overlap_bytes = num_tokens * num_heads * 8, num_tokens * num_heads * CHUNK * 4
    yield prompt.case(
        "convolve_prompts",
        lambda i: prompt.convolved(i)[0],
        lambda: expected_heads(prompt),
        num_tokens * (2 * channels + 2 * num_heads) * 2 + gate_bytes,
    )
    yield prompt.case(
        "find_overlaps",
        lambda _: find_overlaps(heads, gates, weights, prompt.sequences).inverse[:-1],
        lambda: expected_inverse(prompt, heads, gates),
        num_tokens * 2 * NUM_KEY_HEADS * DIM * 2 + gate_bytes + overlap_bytes,
        overlap_flops(prompt),
    )
    start = torch.zeros(num_heads, DIM, DIM, device="cuda")
    values = heads[:, 2 * NUM_KEY_HEADS :].contiguous()

    def expected() -> Tensor:
        q, k, v = prompt.split(heads)
        return law.advance(q, k, v, gates[..., 0], gates[..., 1], start)[0]

    yield prompt.case(
        "scan_chunks",
        lambda _: scan_chunks(heads, overlaps, weights, prompt.states, prompt.sequences, prompt.gpu),
        expected,
        num_tokens * (channels + weights.value_width) * 2 + overlap_bytes + prompt.state_bytes,
        scan_flops(prompt),
    )
    yield prompt.case(
        "recur",
        lambda _: prompt.by_token(heads, gates),
        expected,
        num_tokens * (channels * 2 + weights.value_width * 4) + gate_bytes + prompt.state_bytes,
    )
    yield prompt.case(
        "gated_norm",
        lambda i: prompt.normed(values, i),
        lambda: expected_norm(prompt, values.float()),
        num_tokens * weights.value_width * 6,
    )


def scan_flops(prompt: Prompt) -> float:
    """Return the FLOPs of the products with states, inverses and scores."""
    return prompt.num_tokens * prompt.weights.num_value_heads * (3 * DIM + 2 * CHUNK) * DIM * 2


def overlap_flops(prompt: Prompt) -> float:
    """Return the FLOPs of the products of keys and queries with keys; the inversion's are few."""
    return prompt.num_tokens * NUM_KEY_HEADS * 2 * CHUNK * DIM * 2


def expected_heads(prompt: Prompt) -> Tensor:
    """Return q, k and v of the first input, by head, in fp32."""
    weights, channels = prompt.weights, prompt.weights.conv.shape[0]
    inputs = prompt.xs[0, :, :channels].float().t()
    y = functional.silu(functional.conv1d(functional.pad(inputs, (WIDTH - 1, 0)), weights.conv, groups=channels))
    heads = y.t().unflatten(1, (weights.num_heads, DIM))
    unit = heads * (heads.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    q, k, _ = unit.split([NUM_KEY_HEADS, NUM_KEY_HEADS, weights.num_value_heads], dim=1)
    return torch.cat((q * DIM**-0.5, k, heads[:, 2 * NUM_KEY_HEADS :]), dim=1)


def expected_inverse(prompt: Prompt, heads: Tensor, gates: Tensor) -> Tensor:
    """Return `(1 + overlap)^-1 diag(beta)` of each chunk and value head."""
    chunked = (-1, CHUNK, prompt.weights.num_value_heads)
    k = prompt.split(heads)[1].view(*chunked, DIM).transpose(1, 2)  # [chunks, value_heads, CHUNK, DIM]
    decay, beta = (each.reshape(chunked).transpose(1, 2) for each in gates.unbind(-1))
    total = decay.cumsum(-1)
    since = (total[..., :, None] - total[..., None, :]).tril().exp()
    overlap = (beta[..., None] * (k @ k.mT) * since).tril(-1)
    unit = torch.eye(CHUNK, device="cuda").expand_as(overlap)
    inverse: Tensor = torch.linalg.solve_triangular(unit + overlap, unit, upper=False, unitriangular=True)
    return inverse * beta[..., None, :]


def expected_norm(prompt: Prompt, o: Tensor) -> Tensor:
    """Return `norm(o) * silu(gate)` for the first input."""
    channels, width = prompt.weights.conv.shape[0], prompt.weights.value_width
    gate = prompt.xs[0, :, channels : channels + width].float().view_as(o)
    scale = (o.square().mean(-1, keepdim=True) + prompt.weights.norm_eps).rsqrt()
    return (o * scale * prompt.weights.norm * functional.silu(gate)).flatten(1)


def delta_cases() -> Iterator[Case]:
    """Yield cases lazily, because the buffers of all cases would not fit at once."""
    for model, num_tokens in product(VALUE_HEADS, LENGTHS):
        prompt = Prompt(model, num_tokens)
        yield from whole_cases(prompt)
        yield from kernel_cases(prompt)
