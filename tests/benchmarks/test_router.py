from pathlib import Path

import pytest

from benchmarks import router_streams
from benchmarks.router import main
from benchmarks.router_bodies import LOADS, names
from benchmarks.scale import BETWEEN, IN_HOST, demand_of, pool_of
from common.wire.messages.worker import Role
from deploy.bench.results import read_rows
from router.placement.choice import choose

FIGURES = ("gap_p99", "gap_max", "live_max", "memory_peak", "memory_after", "router_cpu", "request_throughput")
OF_BURSTS = ("dispatch", "loop_of_dispatch", "cpu_of_dispatch")
OF_FRONTS = ("front_loop_per_1000_tokens", "front_cpu_per_1000_tokens")
OF_STREAMS = (
    "loop_per_1000_tokens", "cpu_per_1000_tokens", "tokens_per_loop_second", "output_throughput", "bytes_per_token",
)  # fmt: skip


@pytest.mark.slow
def test_streams_are_watched_beside_a_load_and_every_figure_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.csv"
    loads = "texts of 1 MB"
    assert main(["deploy/demo_model", "--loads", loads, "--seconds", "0.3", "--results", str(results)]) == 0
    rows = read_rows(results)
    assert [(row.workload, row.figure) for row in rows] == [
        (f"8 streams at 10 ms beside {load}", figure) for load in names(loads) for figure in FIGURES
    ]
    assert all(row.value > 0 and row.model == "demo_model" for row in rows)
    assert "x 400" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("num_fronts", [0, 2])
def test_bursts_and_streams_are_measured_and_every_figure_is_kept(tmp_path: Path, num_fronts: int) -> None:
    results = tmp_path / "results.csv"
    sizes = ("--streams", "8", "--prompt-tokens", "32", "--bursts", "1", "--seconds", "1", "--fronts", str(num_fronts))
    assert router_streams.main(["deploy/demo_model", *sizes, "--results", str(results)]) == 0
    rows = read_rows(results)
    assert tuple(row.figure for row in rows) == OF_BURSTS + (OF_FRONTS if num_fronts else ()) + OF_STREAMS
    assert all(row.value > 0 and row.model == "demo_model" for row in rows)


def test_an_unknown_load_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'texts'"):
        names("nothing;texts")
    assert names("; ".join(LOADS)) == list(LOADS)


def test_choices_are_measured_of_all_pairs_and_the_best_is_within_a_host() -> None:
    pool = pool_of(8, 2)
    route = choose(pool, demand_of(pool))
    assert route is not None and route.num_pairs == 64
    assert int(route.prefill.id.split("-")[1]) // 4 == int(route.decode.id.split("-")[1]) // 4
    decode = next(worker for worker in pool if worker.ready.role is Role.DECODE)
    assert {rate: len(members) for rate, members in pool.paths.by_rate(decode).items()} == {IN_HOST: 3, BETWEEN: 4}
