"""Prompts of one chunk and of several are timed on a CPU too, and become rows."""

from pathlib import Path

import pytest

from benchmarks.own_memory import own_memory
from benchmarks.prompt_step import PromptBench, Together, main
from deploy.bench.results import read_rows

DEMO_MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"


@pytest.mark.medium
def test_rows_of_every_length_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.csv"
    flags = [
        "--device",
        "cpu",
        "--lengths",
        "20,150,1000000",
        "--together",
        "3x20+32",
        "--chunk",
        "64",
        "--results",
        str(results),
    ]
    assert main([str(DEMO_MODEL), *flags, "--hardware", "a CPU"]) == 0
    assert "1000000 tokens do not fit, skipped" in capsys.readouterr().out
    rows = read_rows(results)
    assert [row.workload for row in rows] == [
        "prompt alone, 20 tokens, 100 % of the GPU",
        "prompt alone, 150 tokens, 100 % of the GPU",
        "prompts in one step, 3 of 20 tokens behind 32 shared, 100 % of the GPU",
    ]
    assert [row.figure for row in rows] == ["prompt", "prompt", "step"]
    assert all((row.unit, row.model) == ("ms", "demo_model") for row in rows)
    assert all(row.value > 0 for row in rows)


def test_chunks_are_those_of_a_worker() -> None:
    with own_memory("cpu") as memory:
        chunks = PromptBench(str(DEMO_MODEL), 64, memory, "cpu").chunks(150)
    assert [(chunk.start, chunk.end, chunk.is_last) for chunk in chunks] == [
        (0, 64, False),
        (64, 128, False),
        (128, 150, True),
    ]
    assert all(chunk.tables == [list(range(1, 11))] for chunk in chunks)


def test_prompts_of_one_step_begin_with_the_same_blocks_and_go_on_in_their_own() -> None:
    with own_memory("cpu") as memory:
        bench = PromptBench(str(DEMO_MODEL), 64, memory, "cpu")
        chunks = bench.together(Together(3, 20, 32))
        with pytest.raises(ValueError, match="4 of 20 tokens behind 32 shared: more than 64 tokens of a step"):
            bench.together(Together(4, 20, 32))
    assert [(chunk.start, chunk.end, chunk.is_last) for chunk in chunks] == [(32, 52, True)] * 3
    assert [chunk.tables for chunk in chunks] == [[[1, 2, 3, 4]], [[1, 2, 5, 6]], [[1, 2, 7, 8]]]
