"""Rates that are easy to reckon with."""

from dataclasses import replace

from deploy.planning.step_times.rates import Rates, Where
from deploy.planning.step_times.shape import ModelShape

SHAPE = ModelShape(
    num_layers=2, layer_weights=73_728, step_bytes=275_456, weight_bytes=403_456, kv_bytes=256, pair_products=128,
    token_bytes=6656, logit_bytes=32_000,
)  # fmt: skip
STEP_TOKENS = 8192
STEP_MS, TOKEN_MS, ROW_MS, CONTEXT_MS = 1.5, 18.5e-3, 0.5, 1e-4


def made_rates(**changes: object) -> Rates:
    """Prompt steps take 1.5 ms and 18.5 µs a token; decode steps 0.5 ms a row and 0.1 µs a token of context."""
    contexts = (100, 1000, 100_000)
    rates = Rates(
        gpu="a GPU",
        capability=(9, 0),
        memory_bytes=10**12,
        model="made",
        shape=SHAPE,
        step_tokens=STEP_TOKENS,
        prompts=tuple(
            (float(n), share, STEP_MS + n * TOKEN_MS)
            for share in (80.0, 100.0)
            for n in (1, STEP_TOKENS // 2, STEP_TOKENS)
        ),
        steps=tuple(
            (float(rows), float(context), rows * (ROW_MS + context * CONTEXT_MS), 0.1)
            for rows in (1, 2, 64, 256)
            for context in contexts
        ),
        copies=((1.0, 0.0), (2.0, 0.0)),
        share=80,
        beside_steps=((1.0, 2.0),),
        beside_prompt=1.25,
        beside_prompt_ms=0.0,
        whole_wait=0.5,
        shared=Where(0.0, 0.0),
        apart=Where(0.0, 0.0),
        found_ms_per_1000=0.0,
        prefix_kernel_ms=0.0,
        prefix_kernel_ms_per_1000=0.0,
        scattered=1.0,
        reread=1.0,
        router_tokens_per_s=1e4,
        origin=("made",),
    )
    return replace(rates, **changes)  # type: ignore[arg-type]
