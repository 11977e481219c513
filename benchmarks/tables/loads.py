"""Tables of what a client sees under loads, by rows of results.csv. Pure: rows in, cells out."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from benchmarks.loads import PRESETS
from benchmarks.tables.cells import (
    FOUR_GPUS,
    H100,
    MODEL,
    ONE_GPU,
    SMALL_GPU,
    TWO_GPUS,
    Cell,
    Line,
    TableData,
    newest,
    present,
)
from deploy.bench.results import Row

VLLM = "vllm"

LOADS = {preset.label: preset.prefix for preset in PRESETS.values()}
"""Label of a load (input/output tokens), and the prefix of its workloads."""

REUSE = {
    "16 new of 1,024": "concurrency 1, primed 1x1008+16/2,",
    "16 new of 8,192": "concurrency 1, primed 1x8176+16/2,",
    "16 new of 16,000": "concurrency 1, primed 1x15984+16/2,",
    "16 new of 16,000, text": "concurrency 1, text of primed 1x15984+16/2,",
    "32 users, 8 turns of 200/200 after 1,024": "32 users x 8 turns, 1x1024+200/200,",
    "64 users, 8 turns of 200/200 after 1,024": "64 users x 8 turns, 1x1024+200/200,",
    "64 streams, one prefix of 8,192 + 256/256": "concurrency 64, 1x8192+256/256,",
    "512 at once, 8 prefixes of 4,096 + 256/128": "at once, 8x4096+256/128,",
    "24 requests/s, 400 prefixes of 4,096 (Zipf 1) + 256/128": "24 req/s, 400x4096 (Zipf 1)+256/128,",
}
"""Loads whose prompts were partly seen before, as in `LOADS`."""

SERVING = {
    "TTFT p50, ms": "ttft_p50",
    "TTFT p99, ms": "ttft_p99",
    "first gap p50, ms": "first_gap_p50",
    "first gap p99, ms": "first_gap_p99",
    "TPOT p50, ms": "tpot_p50",
    "ITL p99, ms": "itl_p99",
    "E2E p50, ms": "e2e_p50",
    "output tokens/s": "output_throughput",
}
"""Columns of a load, equal with and without another system; includes columns where Baton loses."""

REUSING = SERVING | {"hit rate, %": "hit_rate"}
"""Columns of loads that a prefix cache can serve."""


def by_load(
    loads: Mapping[str, str], figures: Iterable[str], rows: Sequence[Row], hardware: str, system: str, beside: str = ""
) -> list[Line]:
    """Return a line for each measured load, with a cell for each figure."""
    return present(
        (label, [newest(rows, hardware, system, load, figure, beside=beside) for figure in figures])
        for label, load in loads.items()
    )


def serving(hardware: str, system: str, subject: str, rows: Sequence[Row]) -> TableData:
    """Make a table of every measured load, in a client's figures."""
    lines = by_load(LOADS, SERVING.values(), rows, hardware, system)
    return TableData(subject, "load (input/output tokens)", list(SERVING), lines)


def reuse(hardware: str, system: str, beside: str, subject: str, rows: Sequence[Row]) -> TableData:
    """Make a table of every load whose prompts were partly seen before."""
    lines = by_load(REUSE, REUSING.values(), rows, hardware, system, beside)
    return TableData(subject, "load (input/output tokens)", list(REUSING), lines)


def moved(rows: Sequence[Row]) -> TableData:
    """Make a table of the second turn of a conversation, with the first reply on the other GPU."""
    columns = {
        "TTFT p50, ms": "later_turns_ttft_p50",
        "TTFT p99, ms": "later_turns_ttft_p99",
        "first gap p50, ms": "later_turns_first_gap_p50",
        "hit rate, %": "later_turns_hit_rate",
        "MB to decode, both turns": "moved_prompts",
        "MB back": "moved_replies",
    }
    load = "1 users x 2 turns, 1x16000+100/400,"
    cells = [newest(rows, TWO_GPUS, "baton 1P1D", load, figure) for figure in columns.values()]
    lines = present([("100 new behind 16,000 + 100/400", cells)])
    return TableData("two H200s, a worker on each, six conversations", "second turn", list(columns), lines)


def host_tier(rows: Sequence[Row]) -> TableData:
    """Make a table of loads too large for the pool, with host memory and without."""
    loads = {
        "16 new of 16,000, which others drove out": "concurrency 1, crowded out, primed 8x16000+16/2,",
        "8 streams, 1024/128": "concurrency 8, 1024/128,",
        "64 streams, 1024/128": "concurrency 64, 1024/128,",
    }
    systems = ("baton, host tier", "baton, no tier")
    lines = present(
        (label, [_pair(rows, ONE_GPU, load, figure, MODEL, systems) for figure in REUSING.values()])
        for label, load in loads.items()
    )
    subject = "one H200, 16 GB of KV blocks; 48 GB of host memory · none"
    return TableData(subject, "load (input/output tokens)", list(REUSING), lines)


def beside_vllm(rows: Sequence[Row]) -> TableData:
    """Make a table of loads in runs of both systems, and of cold starts."""
    lines = by_load(LOADS, SERVING.values(), rows, ONE_GPU, "baton", VLLM)
    start = newest(rows, ONE_GPU, "baton", "start,", "ready", beside=VLLM)
    lines += present([("ready from a cold start", [start, *[None] * (len(SERVING) - 1)])])
    return TableData("one H200, Baton · vLLM 0.32.0", "load (input/output tokens)", list(SERVING), lines)


def one_long(rows: Sequence[Row]) -> TableData:
    """Make a table of the mutual effects of short streams and a long request."""
    columns = {
        "alone: ITL p50, ms": "itl_alone_p50",
        "it is computed: p50": "itl_prefill_p50",
        "p99": "itl_prefill_p99",
        "it decodes: p50": "itl_decode_p50",
        "p99 ": "itl_decode_p99",
        "its TTFT, ms": "long_ttft",
    }
    lines = present(
        (
            f"{streams} streams",
            [
                newest(rows, ONE_GPU, "baton", f"{streams} streams of 1000 tokens and one of", figure, beside=VLLM)
                for figure in columns.values()
            ],
        )
        for streams in (8, 32, 64)
    )
    return TableData("one H200, Baton · vLLM 0.26.0", "one of 32,000 tokens beside", list(columns), lines)


def deaths(rows: Sequence[Row]) -> TableData:
    """Make a table of the pauses of streams by deaths of a decode worker, without a standby worker and with one."""
    columns = {
        "longest pause, ms": "pause_max",
        "pause p50, ms": "pause_p50",
        "another in its place": "replaced_max",
    }
    load = "3 kills of a decode worker under 16 streams of 1000 tokens"
    systems = {"none": "baton", "a decode worker": "baton --standby decode"}
    lines = present(
        (label, [newest(rows, ONE_GPU, system, load, figure) for figure in columns.values()])
        for label, system in systems.items()
    )
    return TableData("one H200, 3 deaths under 16 streams", "in reserve", list(columns), lines)


def other_models(rows: Sequence[Row]) -> TableData:
    """Make a table of an H200 with models of 8 billion parameters."""
    loads = {label: load for label, load in LOADS.items() if label in ("one stream, 1024/128", "8 streams, 1024/128")}
    lines = present(
        (f"{name}, {label}", [newest(rows, ONE_GPU, "baton", load, figure, model=model) for figure in SERVING.values()])
        for name, model in (("Qwen3-8B", "qwen3-8b"), ("Llama-3.1-8B", "llama3.1-8b"))
        for label, load in loads.items()
    )
    return TableData("one H200", "model and load", list(SERVING), lines)


def by_turns(rows: Sequence[Row]) -> TableData:
    """Make a table of models with room for a single system at a time: each system alone, on equal hardware."""
    loads = {"one stream, 1024/128": "concurrency 1, 1024/128,"} | {
        f"{count} streams, 1024/128": f"concurrency {count}, 1024/128," for count in (8, 16, 32)
    }
    systems = ("baton", "vllm 0.26.0")
    models = {"Qwen3-32B": (ONE_GPU, "qwen3-32b"), "Qwen3-8B in 24 GB": (SMALL_GPU, "qwen3-8b")}
    lines = present(
        (
            f"{name}, {label}",
            [_pair(rows, hardware, load, figure, model, systems) for figure in SERVING.values()],
        )
        for name, (hardware, model) in models.items()
        for label, load in (loads | {"one stream, 8192/32": LOADS["one stream, 8192/32"]}).items()
    )
    return TableData("one H200, Baton · vLLM 0.26.0, each by itself", "model and load", list(SERVING), lines)


def _pair(
    rows: Sequence[Row], hardware: str, load: str, figure: str, model: str, systems: tuple[str, str]
) -> Cell | None:
    """Return a cell of two systems' figures, from separate runs."""
    ours, theirs = (newest(rows, hardware, system, load, figure, model=model) for system in systems)
    if not (ours and theirs):
        return None
    return replace(ours, other=theirs.value, other_spread=theirs.spread, rival=theirs.row)


def workers(rows: Sequence[Row]) -> TableData:
    """Make a table of numbers of workers on four GPUs, everything sent at once."""
    columns = {
        "output tokens/s": "output_throughput",
        "last first token (TTFT p99), ms": "ttft_p99",
        "TPOT p50, ms": "tpot_p50",
        "ITL p99, ms": "itl_p99",
    }
    load = LOADS["512 at once, 1024/128"]
    lines = present(
        (name, [newest(rows, FOUR_GPUS, f"baton {name}", load, figure) for figure in columns.values()])
        for name in ("1P1D", "1P2D", "2P2D", "3P1D")
    )
    return TableData("four H200s, 512 requests of 1024/128 tokens at once", "workers", list(columns), lines)


def sharing(rows: Sequence[Row]) -> TableData:
    """Make a table of loads by the share of the GPU for prompts."""
    columns = {
        "16 req/s: TTFT p50, ms": ("16 requests/s, 1024/128", "ttft_p50"),
        "16 req/s: ITL p99, ms": ("16 requests/s, 1024/128", "itl_p99"),
        "32 req/s: TTFT p50, ms": ("32 requests/s, 1024/128", "ttft_p50"),
        "32 req/s: ITL p99, ms": ("32 requests/s, 1024/128", "itl_p99"),
        "512 at once, tokens/s": ("512 at once, 1024/128", "output_throughput"),
    }
    shares = (60, 70, 80, 90, 95, 100)
    systems = {"no MPS": "baton, no MPS"} | {f"{share} %": f"baton, MPS {share} %" for share in shares}
    lines = present(
        (name, [newest(rows, ONE_GPU, system, LOADS[load], figure) for load, figure in columns.values()])
        for name, system in systems.items()
    )
    return TableData("one H200, a worker of each kind, 1024/128 tokens", "share of prompts", list(columns), lines)


def turns(rows: Sequence[Row]) -> TableData:
    """Make a table of loads on a GPU for both roles, with turns and without, by the share for prompts."""
    columns = {"TTFT p50, ms": "ttft_p50", "TTFT p99, ms": "ttft_p99", "TPOT p50, ms": "tpot_p50",
               "ITL p99, ms": "itl_p99", "tokens/s": "output_throughput"}  # fmt: skip
    systems = {
        ("H200", ONE_GPU): ("share 80, no turns", "share 95, no turns", "share 95, turns"),
        ("H100", H100): ("share 80, no turns", "share 80, turns", "share 85, turns", "share 95, turns",
                         "share 80, turns for 50 ms"),
    }  # fmt: skip
    loads = ("concurrency 64, 1024/128", "8 req/s, 4096/256", "concurrency 4, 30000/128", "32 req/s, 1024/128",
             "concurrency 256, 128/512", "concurrency 8, 1024/128", "at once, 1024/128, 512")  # fmt: skip
    lines = present(
        (
            f"{gpu}, {load}: {name}",
            [newest(rows, hardware, f"baton, {name}", load, figure) for figure in columns.values()],
        )
        for (gpu, hardware), names in systems.items()
        for load in loads
        for name in names
    )
    return TableData("a worker of each kind on a GPU; prompts of token ids", "load", list(columns), lines)
