"""Tables of model families: steps and prompts without a server, and loads beside another system."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.tables.cells import ONE_GPU, Cell, Line, TableData, both, newest, present
from benchmarks.tables.loads import SERVING
from deploy.bench.results import Row

MODELS = {
    "Qwen3-4B in FP8": ("qwen3-4b in fp8", ""),
    "Qwen3-4B in INT8": ("qwen3-4b in int8", ""),
    "Qwen3-4B in INT4": ("qwen3-4b in int4", ""),
    "Qwen2.5-7B": ("qwen2.5-7b", ""),
    "Mistral-7B v0.3": ("mistral-7b-v0.3", ""),
    "Qwen3.5-4B": ("qwen3.5-4b", ""),
    "Qwen3.6-27B": ("qwen3.6-27b", ""),
    "Qwen3-30B-A3B": ("qwen3-30b-a3b", ""),
    "Qwen3-30B-A3B, 24 of 48 layers": ("qwen3-30b-a3b", ", 24 layers"),
    "Qwen3.6-35B-A3B": ("qwen3.6-35b-a3b", ""),
    "gpt-oss-20b": ("gpt-oss-20b", ""),
    "gpt-oss-120b": ("gpt-oss-120b", ""),
    "Gemma 3 4B": ("gemma3-4b", ""),
    "Gemma 4 12B": ("gemma4-12b", ""),
    "DeepSeek-V2-Lite": ("deepseek-v2-lite", ""),
    "DeepSeek-V2-Lite, 9 of 27 layers": ("deepseek-v2-lite", ", 9 layers"),
}
"""Label of a model; its name in results.csv, and how workloads end."""

LOADS = {
    "1 stream, 1024/128": "concurrency 1, 1024/128, 8 requests",
    "8, 1024/128": "concurrency 8, 1024/128, 48 requests",
    "64, 1024/128": "concurrency 64, 1024/128, 192 requests",
    "1, 8192/32": "concurrency 1, 8192/32, 6 requests",
    "8, 8192/32": "concurrency 8, 8192/32, 24 requests",
}


def families_beside_vllm(rows: Sequence[Row]) -> TableData:
    """Make a table of each family's loads in runs of both systems."""
    measured = [row for row in rows if row.hardware == ONE_GPU and row.compared_with.startswith("vllm")]
    found = {(row.model, row.workload, row.figure): row for row in measured}
    lines = present(
        (f"{label}: {load}", [_both(found.get((model, workload + end, figure))) for figure in SERVING.values()])
        for label, (model, end) in MODELS.items()
        for load, workload in LOADS.items()
    )
    return TableData("one H200, Baton · vLLM 0.32.0", "model and load (input/output tokens)", list(SERVING), lines)


def family_steps(rows: Sequence[Row]) -> TableData:
    """Make a table of decode steps at 1,024 tokens beside their read floors, and of prompts, by model."""
    lines: list[Line] = []
    for label, (model, end) in MODELS.items():
        cells: list[Cell | None] = []
        for batch in (1, 8, 64):
            load = f"decode step alone, {batch} sequences at 1024 tokens{end}"
            cells.append(_exactly(rows, model, load, "step", beside="read floor"))
        for tokens in (1024, 8192):
            cells.append(_exactly(rows, model, f"prompt alone, {tokens} tokens, 100 % of the GPU{end}", "prompt"))
        lines.append((label, cells))
    columns = ["step of 1, ms · read floor", "of 8", "of 64", "prompt of 1,024, ms", "of 8,192"]
    return TableData("one H200, no server", "model", columns, present(lines))


def _both(row: Row | None) -> Cell | None:
    return both(row) if row else None


def _exactly(rows: Sequence[Row], model: str, workload: str, figure: str, beside: str = "") -> Cell | None:
    """Return the last row of a workload on the H200, by its whole name; a floor is no rival, so nothing is bold."""
    named = [row for row in rows if row.workload == workload]
    cell = newest(named, ONE_GPU, "baton", workload, figure, model=model, beside=beside)
    return cell and replace(cell, close=float("inf"))
