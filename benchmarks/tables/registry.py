"""All tables by their names in the pages."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from benchmarks import scale, simulated
from benchmarks.loads import FIRST_PAGE, PRESETS
from benchmarks.tables.cells import H100, ONE_GPU, TWO_GPUS, TableData
from benchmarks.tables.families import families_beside_vllm, family_steps
from benchmarks.tables.loads import (
    VLLM,
    beside_vllm,
    by_turns,
    deaths,
    host_tier,
    moved,
    one_long,
    other_models,
    reuse,
    serving,
    sharing,
    turns,
    workers,
)  # fmt: skip
from benchmarks.tables.router import prompt_ids, router, router_memory
from benchmarks.tables.steps import PROMPT, STEP, asks, beside, both_roles, decode_kernels, grid, pulls, sampler
from deploy.bench.results import Row


def first_page(rows: Sequence[Row]) -> TableData:
    """Select the README's loads from the table beside vLLM, each with a link to its run."""
    data = beside_vllm(rows)
    labels = [PRESETS[name].label for name in FIRST_PAGE]
    lines = [line for line in data.lines if line[0] in labels]
    return replace(data, lines=lines, results="benchmarks/results.csv")


TABLES: dict[str, Callable[[Sequence[Row]], TableData]] = {
    "first-page": first_page,
    "beside-vllm": beside_vllm,
    "one-gpu": partial(serving, ONE_GPU, "baton", "one H200, a worker of each kind on it"),
    "two-gpus": partial(serving, TWO_GPUS, "baton 1P1D", "two H200s, a worker on each"),
    "two-gpus-shared": partial(serving, TWO_GPUS, "baton 2P2D", "two H200s, a worker of each kind on both"),
    "reuse": partial(reuse, ONE_GPU, "baton", "", "one H200, a worker of each kind on it"),
    "reuse-beside-vllm": partial(reuse, ONE_GPU, "baton", VLLM, "one H200, Baton · vLLM 0.32.0"),
    "reuse-two-gpus": partial(reuse, TWO_GPUS, "baton 2P2D", "", "two H200s, a worker of each kind on both"),
    "moved": moved,
    "host-tier": host_tier,
    "families-beside-vllm": families_beside_vllm,
    "family-steps": family_steps,
    "h100": partial(serving, H100, "baton", "one H100 with 80 GB, a worker of each kind on it"),
    "other-models": other_models,
    "by-turns": by_turns,
    "workers": workers,
    "sharing": sharing,
    "both-roles": both_roles,
    "turns": turns,
    "decode-step": partial(grid, STEP, "step", "ms a step; one H200, no server", "sequences", "{:,} tokens", "{}"),
    "mixes": partial(beside, "as many keys evenly", "contexts"),
    "shared-prefixes": partial(beside, "read for each row", "contexts"),
    "one-long": one_long,
    "deaths": deaths,
    "decode-kernels": decode_kernels,
    "prompt-step": partial(
        grid, PROMPT, "prompt", "ms a prompt; one H200, no server", "prompt", "{} % of the GPU", "{:,} tokens"
    ),
    "asks": asks,
    "sampler": sampler,
    "pulls": pulls,
    "router": partial(router, "2 x AMD EPYC", "two"),
    "router-memory": router_memory,
    "prompt-ids": prompt_ids,
    "simulated": simulated.table,
    "scale": scale.table,
    "router-16-cores": partial(router, "16 x Intel(R) Xeon(R) Processor", "16"),
}
