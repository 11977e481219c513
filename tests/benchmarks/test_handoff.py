import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.distance import Tokens, figures_of
from benchmarks.handoff import exporter, layout_of, main, parse_args
from benchmarks.handoff_exporter import words_of
from benchmarks.link_rate import rate
from benchmarks.pulls import HandoffBench, Timing
from common.base.errors import TransferFailed
from common.kv.pool import KVPool
from common.kv.shm import FinishedPull
from deploy.bench.results import read_rows

SMALL = shlex.split("--source cpu --preset qwen3-0.6b --num-layers 1 --repeats 3 --hardware here")


@pytest.mark.medium
def test_every_length_is_verified_timed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.csv"
    assert main([*SMALL, "--lengths", "16,100", "--results", str(results)]) == 0
    rows = read_rows(results)
    workloads = ["handoff of 16 tokens (0.1 MB), cpu to cpu", "handoff of 100 tokens (0.5 MB), cpu to cpu"]
    assert [(row.workload, row.figure) for row in rows] == [
        (workload, figure) for workload in workloads for figure in ("pull_p50", "pull_p99", "rate", "call")
    ]
    assert all(row.value > 0 and row.model == "qwen3-0.6b" and row.hardware == "here" for row in rows)
    assert "handoff of qwen3-0.6b KV blocks, cpu to cpu" in capsys.readouterr().out


@pytest.mark.slow
def test_other_bytes_than_the_exporter_wrote_are_found() -> None:
    layout = layout_of("qwen3-0.6b", 1, 16, "bfloat16")
    with exporter("cpu", 64, layout) as export:
        bench = HandoffBench(export, torch.device("cpu"))
        bench.verify(40)
        honest = bench.peer.pull

        def last_block_lost(source_ids: list[int], target: KVPool, target_ids: list[int]) -> FinishedPull:
            honest(source_ids[:-1], target, target_ids[:-1])
            return FinishedPull(0.0)

        bench.peer.pull = last_block_lost  # type: ignore[method-assign]
        with pytest.raises(TransferFailed, match=r"block \d+ holds other bytes"):
            bench.verify(40)

        def another_block_touched(source_ids: list[int], target: KVPool, target_ids: list[int]) -> FinishedPull:
            honest(source_ids, target, target_ids)
            stray = next(i for i in range(64) if i not in target_ids)
            target.blocks[0][stray, 5] = 0
            return FinishedPull(0.0)

        bench.peer.pull = another_block_touched  # type: ignore[method-assign]
        with pytest.raises(TransferFailed, match=r"block \d+ holds other bytes"):
            bench.verify(40)
        bench.close()


@pytest.mark.medium
def test_an_exporter_that_cannot_start_is_reported_with_its_reason(capfd: pytest.CaptureFixture[str]) -> None:
    layout = layout_of("qwen3-0.6b", 1, 16, "bfloat16")
    with pytest.raises(TransferFailed, match="no pool was exported on cpu"), exporter("cpu", 1 << 22, layout):
        pass
    assert "of host memory wanted" in capfd.readouterr().err


def test_no_two_words_of_a_pool_are_alike() -> None:
    words = words_of(torch.arange(100), 4096)
    assert words.shape == (100, 1024)
    assert len(words.unique()) == words.numel()
    assert torch.equal(words_of(torch.tensor([7, 3]), 4096), words[[7, 3]])


@pytest.mark.parametrize(("preset", "token_bytes"), [("qwen3-4b", 147_456), ("llama3.1-8b", 131_072)])
def test_layouts_are_those_of_the_models(preset: str, token_bytes: int) -> None:
    [group] = layout_of(preset, None, 16, "bfloat16").groups
    assert group.token_bytes == token_bytes


def test_figures_count_each_byte_once() -> None:
    timing = Timing(1024, 10**9, [0.001, 0.002, 0.010], call_s=50e-6, device_s=0.0016)
    assert {(figure.name, round(figure.value, 6)) for figure in timing.figures()} >= {
        ("pull_p50", 2.0),
        ("rate", 500.0),
        ("call", 50.0),
        ("device", 1.6),
        ("device_rate", 625.0),
    }


@pytest.mark.parametrize("flags", ["--lengths 0", "--lengths 5,x", "--source cpu --target cuda:0", "--repeats 0"])
def test_wrong_flags_are_refused(flags: str) -> None:
    with pytest.raises(SystemExit):
        parse_args(flags.split())


@pytest.mark.gpu
def test_one_gpu() -> None:
    flags = shlex.split("--source cuda:0 --preset qwen3-0.6b --lengths 128,1024 --repeats 3")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.handoff", *flags], cwd=Path(__file__).parents[2], timeout=100
    )
    assert done.returncode == 0


def test_what_two_hosts_need_beyond_one_and_the_transfer_is_told() -> None:
    here = [Tokens(1.0, 1.5), Tokens(3.0, 3.5), Tokens(2.0, 2.5)]
    apart = [Tokens(each.first_s, 1.1 * (each.second_s + 0.5)) for each in here]
    found = {figure.name: figure.value for figure in figures_of(here, apart, transfer_s=0.5)}
    assert (found["transfer"], found["one_host_ttft"], found["ttft"]) == (500, 2000, 2000)
    assert round(found["ttft_over"]) == -20 and round(found["second_over"]) == 10
    assert round(found["second"]) == 3300


def test_the_rate_of_a_socket_is_measured() -> None:
    assert rate([], [], "127.0.0.1", 8 << 20) > 0
