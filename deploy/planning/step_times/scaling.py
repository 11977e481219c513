"""Estimated rates of another model on a GPU with measured rates of one model.

Matrix products of prompts scale with the weights of all layers. Attention of prompts scales with heads, head size and
layers. A prompt takes no less time than reading the experts that its tokens choose. Reading in a decode step scales
with the bytes read, at the rate of the known model's shortest time. Weights in 8 bits are fewer bytes. The rest of a
decode step scales with layers: launches, tails of kernels, partly filled tiles.

Each step of a prompt makes codes in groups plain before it multiplies: codes are read and elements written, at the
rate of that reading.

Layers with a window read and copy the KV of a window at most. Their attention in prompts grows with tokens, so it
counts as a product.

The kernel for shared prefixes scales with layers, and the work inside scales as attention of prompts. Copies scale with
the KV bytes of a prompt. Overhead of requests and handoffs stays.
"""

import math
from dataclasses import replace

from deploy.planning.step_times.costs import PromptCosts
from deploy.planning.step_times.rates import Points, Rates
from deploy.planning.step_times.shape import ModelShape


def scaled(rates: Rates, shape: ModelShape, model: str) -> Rates:
    """Return rates of a model of `shape`; the given times if the shapes are equal."""
    if shape == rates.shape:
        return replace(rates, model=model)
    known = rates.shape
    layers, pairs = shape.num_layers / known.num_layers, _pairs(shape.pair_products, known)
    return replace(
        rates,
        model=model,
        shape=shape,
        prompts=_prompts(rates, shape),
        steps=_steps(rates, shape),
        prefix_kernel_ms=rates.prefix_kernel_ms * layers,
        prefix_kernel_ms_per_1000=rates.prefix_kernel_ms_per_1000 * pairs,
        copies=tuple(
            (tokens, ms * shape.context_bytes(tokens) / known.context_bytes(tokens)) for tokens, ms in rates.copies
        ),
        origin=(*rates.origin, f"scaled from {rates.model}: an estimate"),
    )


def _prompts(rates: Rates, shape: ModelShape) -> Points:
    """Scale products and attention separately, at each measured share."""
    weights = shape.layer_weights / rates.shape.layer_weights
    pairs, in_window = (_pairs(each, rates.shape) for each in (shape.pair_products, shape.window_pairs))
    points = []
    for share in sorted({int(share) for _, share, _ in rates.prompts}):
        pair_ms = PromptCosts(rates, share).pair_ms
        for tokens, percent, ms in rates.prompts:
            if percent == share:
                attention_ms = min(ms, pair_ms * tokens**2 / 2)
                scaled_ms = (ms - attention_ms) * weights + attention_ms * pairs
                seen = min(tokens, shape.window)
                window_ms = pair_ms * seen * (tokens - seen / 2) * in_window
                points.append((tokens, percent, scaled_ms + window_ms))
    if shape.widening_bytes:
        per_step_ms, step_tokens = shape.widening_bytes / _bytes_per_ms(rates), rates.step_tokens
        points = [(tokens, share, ms + math.ceil(tokens / step_tokens) * per_step_ms) for tokens, share, ms in points]
    if shape.expert_bytes:
        points = [(tokens, share, max(ms, _reading_ms(rates, shape, tokens))) for tokens, share, ms in points]
    return tuple(sorted(points))


def _pairs(pair_products: int, known: ModelShape) -> float:
    """Return the products of a pair of tokens, relative to all layers of the known model."""
    return pair_products / (known.pair_products + known.window_pairs)


def _reading_ms(rates: Rates, shape: ModelShape, tokens: float) -> float:
    """Return the time of reading the weights for some tokens, as fast as the known model's decode steps read."""
    return shape.read_bytes(tokens) / _bytes_per_ms(rates)


def _bytes_per_ms(rates: Rates) -> float:
    """Return the bytes that the known model's decode steps read in a millisecond, at best."""
    known = rates.shape
    return max((known.step_bytes + rows * known.moved_bytes(held)) / ms for rows, held, _, ms in rates.steps)


def _steps(rates: Rates, shape: ModelShape) -> Points:
    """Scale the reading time separately from the rest."""
    known, layers = rates.shape, shape.num_layers / rates.shape.num_layers
    points = []
    for rows, context, ms, least_ms in rates.steps:
        read_bytes = known.read_bytes(rows) + rows * known.moved_bytes(context)
        scaled_ms = least_ms * (shape.read_bytes(rows) + rows * shape.moved_bytes(context)) / read_bytes
        points.append((rows, context, scaled_ms + (ms - least_ms) * layers, scaled_ms))
    return tuple(points)
