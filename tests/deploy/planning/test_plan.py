"""`baton plan`: the formula, the search, and what is printed and returned."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest

from benchmarks.presets import settings
from common.models.forms import Target
from common.settings.slo_section import SloSection
from deploy.cli import main
from deploy.planning import workload
from deploy.planning.estimate import estimate, obstacles
from deploy.planning.search import Search
from deploy.planning.simulation.layout import Layout, parse_layout
from deploy.planning.simulation.loads import Prefixes
from deploy.planning.simulation.outcome import Objectives
from deploy.planning.step_times.costs import Costs
from deploy.planning.step_times.rates import read_rates
from deploy.planning.step_times.scaling import scaled
from deploy.planning.step_times.shape import read_shape
from deploy.planning.workload import Span, Steady
from tests.deploy.planning.made_rates import CONTEXT_MS, ROW_MS, STEP_MS, TOKEN_MS, made_rates
from tests.support.gguf_files import write_gguf
from tests.support.packed_checkpoints import awq_128, pack_checkpoint

DEMO = Path("deploy/demo_model")
RATES = read_rates("h200-qwen3-4b")
LIMITS = Objectives(200.0, 10.0, 99.0)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations of fewer requests than in earnest."""
    monkeypatch.setattr(workload, "LEAST_LATE", 2)
    monkeypatch.setattr(workload, "LEAST_S", 0.5)


def steady(rate: float, inputs: int = 1024, outputs: int = 128) -> Steady:
    return Steady(rate, Span(inputs, inputs), Span(outputs, outputs))


def searched(load: Steady, objectives: Objectives = LIMITS, most_gpus: int = 8) -> Search:
    costs = Costs(RATES)
    each = estimate(costs, load, objectives)
    return Search(costs, load, objectives, each, most_gpus)


def test_a_plan_for_a_checkpoint_of_4_bits_is_that_of_packed_matrices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside plain ones its decode steps are shorter, and its prompts longer: each step widens the matrices."""
    for name in ("packed", "plain"):
        shutil.copytree(DEMO, tmp_path / name)
    pack_checkpoint(tmp_path / "packed", tmp_path / "plain", awq_128())
    told = {}
    for choice in ("auto", "packed", "plain"):
        flags = f"--model {tmp_path / 'packed'} --model-quantization {choice}"
        assert run(f"--rate 10 --ttft-ms 200 --workers 1P1D --gpus 1 {flags}", monkeypatch) == 0
        asked_for = rf" \w+_FLAGS='--model-quantization {choice}'| --model-quantization {choice}"
        told[choice] = re.sub(asked_for, "", capsys.readouterr().out)
    assert told["auto"] == told["packed"] != told["plain"]
    assert ["codes in groups" in each for each in told.values()] == [True, True, False]
    shapes = [read_shape(tmp_path / "packed", Target(RATES.capability), "auto", each) for each in ("auto", "plain")]
    packed, plain = (scaled(RATES, shape, "") for shape in shapes)
    assert RATES.capability == (9, 0) and shapes[0].step_bytes < 0.6 * shapes[1].step_bytes
    assert all(ours[2] < theirs[2] for ours, theirs in zip(packed.steps, plain.steps, strict=True))
    widening_bytes = packed.shape.widening_bytes
    assert widening_bytes == packed.shape.layer_weights * (2 + 0.5 + 8 / 128), "written, read, and scales with offsets"
    known = RATES.shape
    bytes_per_ms = max((known.step_bytes + rows * known.moved_bytes(held)) / ms for rows, held, _, ms in RATES.steps)
    for (tokens, _, ours_ms), (_, _, theirs_ms) in zip(packed.prompts, plain.prompts, strict=True):
        num_steps = math.ceil(tokens / RATES.step_tokens)
        assert ours_ms - theirs_ms == pytest.approx(num_steps * widening_bytes / bytes_per_ms)


def test_the_formula_by_hand() -> None:
    found = estimate(Costs(made_rates()), steady(20.0, 1000, 101), Objectives(100.0, 10.0, 90.0))
    prompt_ms = STEP_MS + 1000 * TOKEN_MS
    assert found.prompt_ms == pytest.approx(prompt_ms)
    assert found.prompt_busy == pytest.approx(20 * prompt_ms / 1e3)
    assert found.num_rows == int(10 / (ROW_MS + 1050.5 * CONTEXT_MS))
    assert found.step_ms == pytest.approx(found.num_rows * (ROW_MS + 1050.5 * CONTEXT_MS))
    assert found.decode_busy == pytest.approx(20 * 100 * found.step_ms / 1e3 / found.num_rows)


def test_the_formula_counts_what_prefixes_spare() -> None:
    """Prompts that are computed behind them, as far as they are there, and rows that read them once."""
    costs, limits = Costs(made_rates(reread=0.0)), Objectives(1e3, 150.0, 90.0)
    lengths = Span(200, 200), Span(101, 101)
    behind = estimate(costs, Steady(20.0, *lengths, prefixes=Prefixes(4, 10_000)), limits)
    assert behind.found == 1.0 and behind.prompt_ms == pytest.approx(STEP_MS + 200 * TOKEN_MS)
    rows, num_shared = behind.num_rows, 4 * (1 - 0.75**behind.num_rows)
    assert behind.step_ms == pytest.approx(rows * (ROW_MS + 250.5 * CONTEXT_MS) + num_shared * 10_000 * CONTEXT_MS)
    whole = estimate(costs, Steady(20.0, Span(10_200, 10_200), lengths[1]), limits)
    assert whole.num_rows < rows and whole.prompt_busy > 10 * behind.prompt_busy
    too_many = Prefixes(4 * costs.room.kv_tokens(1, 1) // 10_000, 10_000)
    missed = estimate(costs, Steady(20.0, *lengths, prefixes=too_many), limits)
    assert missed.found == pytest.approx(0.25, abs=1e-3)
    assert missed.prompt_ms == pytest.approx(0.25 * behind.prompt_ms + 0.75 * whole.prompt_ms, rel=0.01)
    assert missed.least_prefill == behind.least_prefill, "several GPUs may have all of them"
    assert not obstacles(costs, Steady(20.0, *lengths, prefixes=too_many), Objectives(behind.prompt_ms + 0.1, 150.0))


@pytest.mark.parametrize(
    ("inputs", "objectives", "message"),
    [
        (8192, Objectives(100.0, 10.0), r"a first token within 100 ms: a prompt alone on a GPU takes 12\d\.\d ms"),
        (1024, Objectives(100.0, 2.0), r"2 ms a token: a decode step of one sequence takes 2\.3\d ms"),
        (900_000, Objectives(1e9, 1e9), "a request of 900,128 tokens: a GPU that does both has room for"),
    ],
)
def test_what_no_number_of_gpus_can_do_is_said_with_the_bound(
    inputs: int, objectives: Objectives, message: str
) -> None:
    (found,) = obstacles(Costs(RATES), steady(1.0, inputs), objectives)
    assert re.search(message, found)
    assert not obstacles(Costs(RATES), steady(1.0, 1024), LIMITS)


def test_the_fewest_gpus_are_found_and_no_fewer_keep_the_limits() -> None:
    for rate, most in ((10.0, 8), (60.0, 8), (110.0, 8)):
        search = searched(steady(rate), most_gpus=most)
        chosen = search.run()
        assert chosen is not None and search.attains(chosen)
        num_gpus = chosen.layout.num_gpus
        tried = {trial.layout: search.attains(trial) for trial in search.trials}
        assert not any(good for layout, good in tried.items() if layout.num_gpus < num_gpus)
        for prefill in range(1, num_gpus - 1):  # nor does a split that was not tried
            fewer = Layout(prefill, num_gpus - 1 - prefill, num_gpus - 1)
            assert fewer in tried or not search.attains(search.try_layout(fewer))


def test_who_keeps_limits_only_while_queues_grow_does_not_keep_them() -> None:
    """2P2D on two GPUs computes 100 prompts a second, and its decode steps fall behind."""
    search = searched(steady(100.0), Objectives(1e6, 1e6))
    behind, ahead = (search.try_layout(Layout(2, 2, num_gpus)) for num_gpus in (2, 4))
    assert behind.attainment == ahead.attainment == 100
    assert (behind.keeps_up, ahead.keeps_up) == (False, True)
    assert (search.attains(behind), search.attains(ahead)) == (False, True)


@pytest.mark.medium
def test_layouts_are_tried_with_turns_by_the_targets_of_workers() -> None:
    costs, load = Costs(RATES), steady(20.0, inputs=2048)
    each = estimate(costs, load, LIMITS)
    none, always = (
        Search(costs, load, LIMITS, each, 1, targets).try_layout(parse_layout("1P1D", 1))
        for targets in (SloSection(itl_ms=0.0), SloSection(ttft_ms=0.0))
    )
    assert always.ttft_ms[1] < 0.9 * none.ttft_ms[1]
    assert always.tpot_ms[1] > none.tpot_ms[1]


@pytest.mark.medium
def test_more_load_takes_no_fewer_gpus() -> None:
    sizes = [
        chosen.layout.num_gpus if (chosen := searched(steady(rate)).run()) else 99 for rate in (5, 40, 80, 160, 999)
    ]
    assert sizes == sorted(sizes) and sizes[0] == 1 and sizes[-1] == 99


def run(argv: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["baton", "plan", *argv.split()])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert isinstance(exit_info.value.code, int)
    return exit_info.value.code


@pytest.mark.medium
def test_a_plan_says_formula_candidates_and_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--rate 100 --ttft-ms 200 --tpot-ms 10", monkeypatch) == 0
    out = capsys.readouterr().out
    assert re.search(r"prefill  100 prompts/s x 13\.\d ms = 1\.3\d GPUs busy", out)
    assert re.search(r"decode   \d+ rows of 1,088 tokens take 9\.\d\d ms a step", out)
    (chosen,) = re.findall(r"^>  (\d)P(\d)D +(\d) .* (\d+\.\d) %", out, re.MULTILINE)
    prefill, decode, gpus, attained = chosen
    assert float(attained) >= 99
    serve = f"baton serve MODEL --prefill {prefill} --decode {decode} --gpus {','.join(map(str, range(int(gpus))))}\n"
    replicas = f"BATON_PREFILL_REPLICAS={prefill} BATON_DECODE_REPLICAS={decode}"
    assert serve in out and f"{replicas} docker compose -f deploy/compose.yaml -f deploy/compose.gpu.yaml up -d" in out


@pytest.mark.medium
@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ("--rate 4 --input-len 8192 --ttft-ms 100", 1, "No number of GPUs keeps these limits"),
        ("--rate 900 --gpus 2 --ttft-ms 200", 1, r"No layout of up to 2 GPUs .* By formula [\d.]+ GPUs are busy"),
        ("--rate 90 --gpus 2 --workers 1P1D --ttft-ms 200", 1, r"1P1D +2 +prompts take 1\d\d% of the time"),
        ("--rate 3 --input-len 100-2000 --ttft-ms 300", 0, "3 requests/s of 100 to 2,000 prompt and 128 output tokens"),
        (
            "--rate 3 --model deploy/demo_model --ttft-ms 300 --input-len 64 --output-len 8",
            0,
            "baton serve deploy/demo_model .*\n(.*\n)*Rates are scaled from those of another model",
        ),
        (
            "--rate 3 --kv-dtype fp8 --ttft-ms 300 --input-len 64 --output-len 8",
            0,
            "baton serve MODEL .* --kv-dtype fp8\n.*BATON_DECODE_FLAGS='--kv-dtype fp8' docker(.*\n)*.*scaled",
        ),
        (
            "--rate 3 --model deploy/demo_model --model-quantization int8 --model-head fp8 --kv-dtype fp8 "
            "--ttft-ms 300 --input-len 64",
            0,
            "baton serve deploy/demo_model .* --model-quantization int8 --model-head fp8 --kv-dtype fp8\n.*"
            "ROUTER_FLAGS='--model-quantization int8 --model-head fp8' "
            "BATON_PREFILL_FLAGS='--model-quantization int8 --model-head fp8 --kv-dtype fp8' "
            "BATON_DECODE_FLAGS='--model-quantization int8 --model-head fp8 --kv-dtype fp8' docker(.*\n)*.*scaled",
        ),
        (
            "--rate 3 --model deploy/demo_model --model-quantization int4 --ttft-ms 300 --input-len 64 --output-len 8",
            0,
            "baton serve .* --model-quantization int4(.*\n)*These decode steps are too short: codes in groups were",
        ),
        (
            "--rate 3 --kv-dtype fp8 --slo-itl-ms 0 --slo-ttft-ms 50 --ttft-ms 300 --input-len 64 --output-len 8",
            0,
            "baton serve MODEL .* --kv-dtype fp8 --slo-itl-ms 0 --slo-ttft-ms 50\n"
            ".*PREFILL_FLAGS='--kv-dtype fp8 --slo-itl-ms 0 --slo-ttft-ms 50' .*docker",
        ),
        ("--rate 3 --ttft-ms 9 --slo-itl-ms -1", 2, "--slo-itl-ms: -1: "),
        ("--rate 3 --ttft-ms 9 --model-quantization fp8", 2, "name a directory or GGUF file with --model"),
        ("--rate 3 --ttft-ms 9 --model-head fp8", 2, "--model-head fp8: rates do not say"),
        ("--rate 3", 2, "no limit to plan for"),
        ("--ttft-ms 9", 2, "what to plan for"),
        ("--rate 3 --trace x --ttft-ms 9", 2, "what to plan for"),
        ("--trace /no/such --ttft-ms 9", 2, "No such file"),
        ("--trace x --input-len 5 --ttft-ms 9", 2, "not with --trace"),
        ("--rate 3 --ttft-ms 9 --model-rates h300", 2, "a file, or one of h200-qwen3-4b. How to measure others"),
        ("--rate 3 --ttft-ms 9 --workers 9P --gpus 9", 2, "for example 2P2D"),
        ("--rate 3 --ttft-ms 9 --input-len 0", 2, "0: 1 to 16777216"),
        ("--rate 3 --ttft-ms 9 --input-len 9-3", 2, "the smaller one first"),
        (
            "--rate 60 --ttft-ms 200 --tpot-ms 12 --input-len 256 --prefixes 8x4096 --gpus 2",
            0,
            "256 prompt and 128 output tokens behind 8 prefixes of 4,096",
        ),
        ("--rate 60 --ttft-ms 200 --tpot-ms 12 --input-len 4352 --gpus 2", 1, "By formula"),
        (
            "--rate 60 --ttft-ms 400 --input-len 64 --prefixes 400x4096 --gpus 1",
            1,
            r"46% of prefixes are there(.*\n)*No layout of up to 1 GPUs",
        ),
        ("--rate 3 --ttft-ms 9 --prefixes 8", 2, "--prefixes: 8: COUNTxTOKENS, for example 8x4096"),
        ("--rate 3 --ttft-ms 9 --prefixes 0x8", 2, "0x8: 1 to 100000 prefixes of 1 to 16777216 tokens"),
        ("--trace x --prefixes 8x8 --ttft-ms 9", 2, "not with --trace"),
        ("--rate nan --ttft-ms 9", 2, r"--rate: nan: 0\.001 to"),
        (
            "--rate 60 --ttft-ms 400 --tpot-ms 20 --workers 2P2D --gpus 2 --hosts 2 --host-gb-per-s 10",
            0,
            "links    KV blocks of all prompts are 9.06 GB/s(.*\n)*>  2P2D +4 +2 (.*\n)*"
            "    1 host: baton serve MODEL --prefill 1 --decode 1 --gpus 0,1 .*\n"
            "    1 host: baton join MODEL --prefill 1 --decode 1 --gpus 0,1 --net-secret-file secret",
        ),
        (
            "--rate 60 --ttft-ms 400 --tpot-ms 20 --workers 2P2D --gpus 2 --hosts 2 --host-gb-per-s 9 --spread",
            1,
            "KV blocks take 101% of what the hosts' links carry",
        ),
        (
            "--rate 60 --ttft-ms 400 --tpot-ms 20 --workers 2P2D --gpus 2 --hosts 2 --host-gb-per-s 40 --spread",
            0,
            "    1 host: baton serve MODEL --prefill 0 --decode 2 --gpus 0,1 .*\n"
            "    1 host: baton join MODEL --prefill 2 --decode 0 --gpus 0,1 --net-secret-file secret",
        ),
        ("--rate 3 --ttft-ms 90 --hosts 2", 2, "say how fast KV blocks travel between them"),
    ],
)
def test_answers_and_refusals(
    argv: str, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(argv, monkeypatch) == code
    said = capsys.readouterr()
    assert re.search(message, said.out + said.err), said


def test_8_bits_of_weights_and_of_keys_shorten_decode_steps_and_no_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings("qwen3-8b").values))
    said = []
    for flags in ("", "--model-quantization fp8", "--model-quantization fp8 --kv-dtype fp8"):
        assert run(f"--rate 3 --ttft-ms 300 --model {tmp_path} {flags}", monkeypatch) == 0
        said.append(re.findall(r"prompts/s x ([\d.]+) ms|tokens take ([\d.]+) ms", capsys.readouterr().out))
    prompts, steps = ([float(found[at][at]) for found in said] for at in (0, 1))
    assert prompts[0] == prompts[1] == prompts[2]
    assert steps[0] > steps[1] > steps[2]


def test_a_trace_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 50 * n, "input_length": 500 + n, "output_length": 40} for n in range(300)]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert run(f"--trace {path} --speed 2 --ttft-ms 200 --tpot-ms 10", monkeypatch) == 0
    out = capsys.readouterr().out
    assert "300 requests of trace.jsonl in 7.5 s, 40.1 a second" in out
    assert re.search(r"^>  1P1D +1 ", out, re.MULTILINE)


def test_a_directory_with_a_gguf_file_is_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As for `baton serve`, whose command line can be pasted."""
    path = write_gguf(tmp_path / "demo model.gguf", DEMO)
    argv = f"--rate 3 --ttft-ms 300 --input-len 64 --output-len 8 --model {tmp_path}"
    assert run(argv, monkeypatch) == 0
    assert f"baton serve '{path}' --prefill" in capsys.readouterr().out
