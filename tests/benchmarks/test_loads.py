"""Both commands of a named load describe the same requests."""

import argparse
import json
import math
import shlex

import pytest

from benchmarks.loads import FIRST_PAGE, MAX_LEN, PRESETS, main
from deploy.bench.load import Load
from deploy.bench.options import parse_args
from deploy.bench.origin import ROOT
from deploy.bench.workload import Even


def lines_of(capsys: pytest.CaptureFixture[str], *argv: str) -> list[list[str]]:
    assert main(list(argv)) == 0
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]


def vllm_args(flags: list[str]) -> argparse.Namespace:
    """Parse the flags of `vllm bench serve`, by their types and defaults there (0.32.0)."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for name in ("backend", "base-url", "tokenizer", "dataset-name", "percentile-metrics", "metric-percentiles"):
        parser.add_argument(f"--{name}", required=name in ("base-url", "tokenizer"))
    for name in ("random-input-len", "random-output-len", "num-prompts", "seed", "max-concurrency"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--temperature", type=float, required=True)
    for name, default in (("random-range-ratio", 0.0), ("request-rate", math.inf), ("burstiness", 1.0), ("top-p", 1.0)):
        parser.add_argument(f"--{name}", type=float, default=default)
    for name in ("ignore-eos", "save-result"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(flags)


@pytest.mark.parametrize("name", PRESETS)
def test_both_clients_send_as_many_prompts_of_the_same_lengths_at_the_same_times(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = lines_of(capsys, name, "/tmp/m", "--texts")
    assert [line[0] for line in lines] == ["baton", "vllm", "python", *["vllm"] * 4]
    ours = parse_args(lines[2][3:], "")
    assert ours.all_at_once == (not ours.rate and not ours.concurrency)
    assert ours.tokenizer and (ours.started_by, ours.vs_started_by) == tuple(map(shlex.join, lines[:2]))
    for url, warm_up, line in ((ours.url, *lines[3:5]), (ours.vs, *lines[5:7])):
        theirs = vllm_args(line[3:])
        assert vllm_args(warm_up[3:]).seed != theirs.seed == ours.seed, "what was sent once is known to a prefix cache"
        assert (theirs.base_url, theirs.num_prompts, theirs.ignore_eos) == (url, ours.num_prompts, True)
        assert (theirs.temperature, theirs.top_p) == (ours.temperature, ours.top_p)
        assert theirs.request_rate == (ours.rate or math.inf) and theirs.burstiness == ours.burstiness
        assert theirs.max_concurrency == ours.concurrency
        for mean, fixed, drawn in (
            (theirs.random_input_len, ours.input_len, ours.input_range),
            (theirs.random_output_len, ours.output_len, ours.output_range),
        ):
            ratio = theirs.random_range_ratio
            low, high = math.floor(mean * (1 - ratio)), math.ceil(mean * (1 + ratio))
            assert (drawn or Even(fixed, fixed)) == Even(low, high)
    preset = PRESETS[name]
    assert sum(preset.lengths(mean)[1] for mean in (preset.num_inputs, preset.num_outputs)) < MAX_LEN


@pytest.mark.parametrize("name", PRESETS)
def test_a_load_is_found_by_its_prefix_and_no_other_is(name: str) -> None:
    workload = Load(parse_args(PRESETS[name].ours(), "")).name
    assert [other for other, preset in PRESETS.items() if workload.startswith(preset.prefix)] == [name]


def test_runs_have_seeds_of_their_own_and_the_first_page_its_loads(capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys, "first-page", "/tmp/m", "--runs", "3", "--seed", "7")
    ours = [parse_args(line[3:], "") for line in lines if line[:3] == ["python", "-m", "benchmarks.serve"]]
    assert [args.seed for args in ours] == [7, 8, 9] * len(FIRST_PAGE)
    bodies = [json.loads(Load(args).prompts(0)[0].body("m")) for args in ours[:2]]
    assert bodies[0]["prompt"] != bodies[1]["prompt"] and isinstance(bodies[0]["prompt"], list)
    with pytest.raises(SystemExit):
        main(["first-page,no-such-load"])


def test_every_load_is_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    for line in capsys.readouterr().out.splitlines():
        assert f"`{line.split()[0]}`" in page
