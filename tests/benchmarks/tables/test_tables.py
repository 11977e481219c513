"""The pages' tables say what results.csv says, and which figures a table takes."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.tables.__main__ import TABLE, main, written
from benchmarks.tables.cells import ONE_GPU, SMALL_GPU, Cell, TableData, merged, newest, results
from benchmarks.tables.layout import render
from benchmarks.tables.loads import beside_vllm, by_turns, serving, sharing
from benchmarks.tables.registry import TABLES, first_page
from deploy.bench.origin import ROOT
from deploy.bench.results import Row

ROW = Row(
    date="2026-01-02", commit="abc", hardware=ONE_GPU, stack="", system="baton", model="qwen3-4b",
    workload="concurrency 1, 1024/128, 16 requests", figure="ttft_p50", value=16.62, unit="ms",
)  # fmt: skip


def beside(value: float, other: float, **changes: Any) -> Row:
    return replace(ROW, value=value, compared_with="vllm 0.26.0", compared_value=other, **changes)


def test_every_table_in_the_pages_is_what_the_results_say() -> None:
    assert main(["--check"]) == 0, "run `python -m benchmarks.tables`"


@pytest.mark.parametrize("unit", ["tokens/s", "GB/s"])
def test_a_figure_in_the_text_of_a_page_has_a_row(unit: str) -> None:
    pages = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "\n".join(TABLE.sub("", page.read_text(encoding="utf-8")) for page in pages)
    prose = " ".join(line.strip() for line in text.splitlines() if not line.startswith("    "))
    said = set(re.findall(rf"([\d,.]*\d) (?:output )?{unit}", prose))
    rows = {f"{row.value:,.0f}" for row in results() if row.unit == unit}
    assert said and said <= rows, f"no row: {said - rows}"


def test_the_newest_row_of_a_load_counts_alone_or_in_company() -> None:
    rows = [ROW, replace(ROW, value=15.1), beside(18, 30), replace(ROW, hardware="another", value=1)]
    load = "concurrency 1, 1024/128,"
    assert newest(rows, ONE_GPU, "baton", load, "ttft_p50") == Cell(rows[1], 15.1)
    assert newest(rows, ONE_GPU, "baton", load, "ttft_p50", beside="vllm") == Cell(rows[2], 18.0, 30.0)
    assert newest(rows, ONE_GPU, "baton", "concurrency 1, 128/", "ttft_p50") is None
    assert newest(rows, ONE_GPU, "baton 1P1D", load, "ttft_p50") is None


def test_the_better_of_two_is_bold_whichever_way_is_better() -> None:
    rows = [
        beside(18.04, 30.27),
        beside(40.5, 35.25, figure="ttft_p99"),
        beside(3.73, 2.07, figure="first_gap_p50"),
        beside(4.64, 5.72, figure="first_gap_p99"),
        beside(9.5, 4.25, figure="itl_p99"),
        beside(1000, 2000.4, figure="output_throughput", unit="tokens/s"),
        beside(5, 5, figure="tpot_p50"),
        beside(22.784, 134.6, workload="start, nothing compiled", figure="ready", unit="s"),
    ]
    stream, start = render(beside_vllm(rows)).splitlines()[2:4]
    assert stream == (
        "| one stream, 1024/128 | **18.0** · 30.3 | 40.5 · **35.2** | 3.73 · **2.07** | **4.64** · 5.72 | 5.00 · 5.00 "
        "| 9.50 · **4.25** |  | 1,000 · **2,000** |"
    )
    assert start == "| ready from a cold start | **22.8 s** · 135 s |  |  |  |  |  |  |  |"


def test_the_first_page_shows_some_loads_of_the_table_beside_vllm() -> None:
    rows = [beside(18.04, 30.27), beside(7.5, 17.9, workload="concurrency 1, 128/256, 16 requests")]
    assert len(TABLES["beside-vllm"](rows).lines) == 2
    assert [label for label, _ in first_page(rows).lines] == ["one stream, 1024/128"]
    first = render(first_page([replace(row, line=7) for row in rows])).splitlines()[2]
    assert first.startswith("| [one stream, 1024/128](benchmarks/results.csv#L7) | **18.0** · 30.3 |")


def test_more_hits_are_better_and_a_server_that_tells_none_has_a_dash() -> None:
    told = beside(96.9, 87.5, workload="32 users x 8 turns, 1x1024+200/200, 256 requests", figure="hit_rate", unit="%")
    untold = replace(told, workload="at once, 8x4096+256/128, 512 requests", compared_value=math.nan)
    lines = render(TABLES["reuse-beside-vllm"]([told, untold])).splitlines()[2:4]
    assert lines == [
        "| 32 users, 8 turns of 200/200 after 1,024 |  |  |  |  |  |  |  |  | **96.9** · 87.5 |",
        "| 512 at once, 8 prefixes of 4,096 + 256/128 |  |  |  |  |  |  |  |  | 96.9 · - |",
    ]
    assert not TABLES["reuse"]([told]).lines, "nothing was measured alone"


def test_a_table_says_where_its_rows_are_from() -> None:
    later = replace(ROW, date="2026-01-03", commit="def", workload="at once, 1024/128, 512 requests", value=3379.2)
    text = render(serving(ONE_GPU, "baton", "one GPU", [ROW, later]))
    assert text.splitlines()[2:] == [
        "| one stream, 1024/128 | 16.6 |  |  |  |  |  |  |  |",
        "| 512 at once, 1024/128 | 3,379 |  |  |  |  |  |  |  |",
        "",
        "(one GPU; 2026-01-02, commit abc; 2026-01-03, commit def; one run each)",
    ]


def test_several_runs_show_their_median_and_range_and_no_winner_where_ranges_meet() -> None:
    apart, meeting, lone = "concurrency 1, 1024/128, 9", "16 req/s, 1024/128, 9", "at once, 1024/128, 9"
    runs = [beside(ours, theirs, workload=apart) for ours, theirs in ((19, 30), (17.5, 31), (18, 35))]
    runs += [beside(ours, theirs, workload=meeting) for ours, theirs in ((20, 24), (25, 26), (21, 28))]
    older = beside(1, 2, workload=apart, commit="older")
    rows = merged([older, *runs, beside(3000, 4000, workload=lone)])
    text = render(beside_vllm(rows)).splitlines()
    assert [line.split(" | ")[1] for line in text[2:5]] == [
        "**18.0 (17.5-19.0)** · 31.0 (30.0-35.0)",
        "21.0 (20.0-25.0) · 26.0 (24.0-28.0)",
        "**3,000** · 4,000",
    ]
    assert "median (least-most) of 3 runs, one run where there is no range)" in text[6]


def test_a_table_tells_how_the_other_server_was_started_or_that_its_rows_do_not() -> None:
    start = "vllm serve m --max-num-seqs 256"
    told = beside(18, 30, compared_started_by=start)
    untold = beside(7, 9, workload="concurrency 1, 128/256, 16 requests", commit="def")
    assert render(beside_vllm([told, untold])).splitlines()[-2:] == [
        f"vLLM 0.26.0, commit abc: `{start}`.",
        "How vLLM 0.26.0 was started is not in the rows of commit def.",
    ]
    ours, theirs = (replace(ROW, hardware=SMALL_GPU, model="qwen3-8b", system=name, started_by=f"{name} serve")
                    for name in ("baton", "vllm 0.26.0"))  # fmt: skip
    text = render(by_turns([ours, theirs]))
    assert "Baton, commit abc: `baton serve`." in text and "vLLM 0.26.0, commit abc: `vllm 0.26.0 serve`." in text


def test_shares_are_told_apart() -> None:
    rows = [
        replace(ROW, system=f"baton, MPS {share} %", workload="16 req/s, 1024/128, 256 requests", value=value)
        for share, value in ((80, 32.1), (100, 21.4))
    ]
    assert [(label, cells[0].value if cells[0] else None) for label, cells in sharing(rows).lines] == [
        ("80 %", 32.1),
        ("100 %", 21.4),
    ]


def test_nothing_measured_is_said() -> None:
    assert render(TableData("one GPU", "load", ["ms"], [])) == "Not measured yet (one GPU).\n"


def test_only_what_is_between_markers_is_written_and_unknown_names_are_refused() -> None:
    page = "before\n<!-- table one-gpu -->\nold\n<!-- end of table -->\nafter\n"
    text = written(page, [ROW])
    assert text.startswith("before\n<!-- table one-gpu -->\n\n| load") and text.endswith(
        "<!-- end of table -->\nafter\n"
    )
    assert "old" not in text and written(text, [ROW]) == text
    with pytest.raises(ValueError, match="table 'one-cpu': one of first-page, beside-vllm, one-gpu"):
        written(page.replace("one-gpu", "one-cpu"), [ROW])


def test_steps_of_other_models_are_no_steps_of_the_model() -> None:
    step = replace(ROW, workload="decode step alone, 1 sequences at 1024 tokens", figure="step", value=2.31)
    rows = [step, replace(step, model="qwen3-4b in int4", value=5.74)]
    assert render(TABLES["asks"](rows)).splitlines()[2] == "| nothing more | 2.31 |  |  |  |"


def test_kernels_are_those_last_planned_beside_the_read_ceiling() -> None:
    kernel = replace(ROW, figure="time", value=10, unit="us", compared_with="read floor", compared_value=8)
    rows = [
        replace(kernel, workload="kernel decode qkv 4 (skinny), 31.5 MB"),
        replace(kernel, workload="kernel decode qkv 4 (ring), 31.6 MB", compared_value=5),
        replace(kernel, workload="kernel rms_norm 4, 0.1 MB"),
        replace(kernel, workload="kernel decode attention 8 x 1024 (fused), 31.5 MB", compared_value=4.5),
    ]
    assert render(TABLES["decode-kernels"](rows)).splitlines()[2:5] == [
        "| qkv 4 (ring) | 10.0 | 50.0 |",
        "| attention 8 x 1024 (fused) | 10.0 | 45.0 |",
        "",
    ]
