"""What another dense model would take on a GPU of which one model's rates are known: an estimate, not a measurement.

Products of prompts grow with the weights of all layers, attention of prompts with heads, their size and layers. Of a
decode step what reading takes grows with the bytes that it reads, at the rate at which the known model's least time
says that the GPU reads; all else of it, launches, tails of kernels, tiles that are not full, with the number of layers.
The kernel by which it reads shared prefixes once grows with layers, its work as attention of prompts does. Copies grow
with the bytes of KV of a token. What a request and a handoff take beside these stays.
"""

from dataclasses import replace

from deploy.planning.step_times.costs import PromptCosts
from deploy.planning.step_times.rates import Points, Rates
from deploy.planning.step_times.shape import ModelShape


def scaled(rates: Rates, shape: ModelShape, model: str) -> Rates:
    """Rates of a model of that shape; those that were given if it has the same."""
    if shape == rates.shape:
        return replace(rates, model=model)
    known = rates.shape
    layers, pairs = shape.num_hidden_layers / known.num_hidden_layers, shape.pair_products / known.pair_products
    bytes_per_token = shape.kv_bytes / known.kv_bytes
    return replace(
        rates,
        model=model,
        shape=shape,
        prompts=_prompts(rates, shape),
        steps=_steps(rates, shape),
        prefix_kernel_ms=rates.prefix_kernel_ms * layers,
        prefix_kernel_ms_per_1000=rates.prefix_kernel_ms_per_1000 * pairs,
        copies=tuple((tokens, ms * bytes_per_token) for tokens, ms in rates.copies),
        origin=(*rates.origin, f"scaled from {rates.model}: an estimate"),
    )


def _prompts(rates: Rates, shape: ModelShape) -> Points:
    """Products and attention apart, at each share that was measured."""
    weights = shape.layer_weights / rates.shape.layer_weights
    pairs = shape.pair_products / rates.shape.pair_products
    points = []
    for share in sorted({int(share) for _, share, _ in rates.prompts}):
        pair_ms = PromptCosts(rates, share).pair_ms
        for tokens, percent, ms in rates.prompts:
            if percent == share:
                attention_ms = min(ms, pair_ms * tokens**2 / 2)
                points.append((tokens, percent, (ms - attention_ms) * weights + attention_ms * pairs))
    return tuple(sorted(points))


def _steps(rates: Rates, shape: ModelShape) -> Points:
    """What is read apart from the rest."""
    known, layers = rates.shape, shape.num_hidden_layers / rates.shape.num_hidden_layers
    points = []
    for rows, context, ms, least_ms in rates.steps:
        tokens = rows * context
        read_bytes = known.step_bytes + tokens * known.kv_bytes
        scaled_ms = least_ms * (shape.step_bytes + tokens * shape.kv_bytes) / read_bytes
        points.append((rows, context, scaled_ms + (ms - least_ms) * layers, scaled_ms))
    return tuple(points)
