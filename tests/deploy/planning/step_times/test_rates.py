"""Files of rates say what rows say, and costs say what was measured where it was."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import rates as made
from benchmarks.pool_room import fitting
from benchmarks.presets import settings
from benchmarks.tables.cells import results
from benchmarks.tables.steps import SHARED, TOGETHER
from common.base.errors import ConfigError
from common.device.engine.step_rules import MIN_SPARED_BYTES, TYPICAL_TOKENS
from common.models.forms import Target
from common.models.loader import model_bytes
from common.models.reading import decoder_config, read_config
from common.ops.prompt_attention import MAX_KEYS
from common.wire.values.kv_layout import KVLayout
from common.wire.values.pool_shape import PoolShape
from deploy.bench.origin import ROOT
from deploy.planning.step_times import costs
from deploy.planning.step_times.costs import MAX_ROWS, PromptCosts, StepCosts
from deploy.planning.step_times.memory import Room
from deploy.planning.step_times.rates import from_json, read_rates, shipped
from deploy.planning.step_times.scaling import scaled
from deploy.planning.step_times.shape import ModelShape, read_shape, shape_of

RATES = read_rates("h200-qwen3-4b")


def test_shipped_files_are_what_the_rows_say() -> None:
    assert made.main(["--check"]) == 0, "run `python -m benchmarks.rates`"
    assert set(shipped()) == set(made.FILES)


def test_a_file_is_read_as_it_was_written_and_another_is_refused_by_name() -> None:
    text = made.as_json(RATES)
    assert from_json(text, "x") == RATES
    told = json.loads(text)
    for name in told:
        with pytest.raises(ConfigError, match=r"rates of f\.json"):
            from_json(json.dumps({key: value for key, value in told.items() if key != name}), "f.json")
    wrong: tuple[dict[str, object], ...] = (
        {"steps": [[1, 2]]},
        {"prompts": []},
        {"copies": [[1, math.nan]]},
        {"shape": {}},
        {"more": 1},
    )
    for changes in wrong:
        with pytest.raises(ConfigError, match="rates of"):
            from_json(json.dumps(told | changes), "f.json")
    with pytest.raises(ConfigError, match="a file, or one of h200-qwen3-4b"):
        read_rates("h300")


@pytest.mark.parametrize("share", [60, 80, 100])
def test_prompts_take_what_was_measured(share: int) -> None:
    costs = PromptCosts(RATES, share)
    for tokens, percent, ms in RATES.prompts:
        if percent == share:
            assert costs.prompt_ms(int(tokens)) == pytest.approx(ms, rel=0.01)


def test_steps_of_many_prompts_behind_a_prefix_take_what_was_results() -> None:
    compared = 0
    for row in results():
        if match := TOGETHER.fullmatch(row.workload):
            count, tokens, before, share = map(int, match.groups())
            costs = PromptCosts(RATES, share)
            assert costs.ms([(tokens, before)] * count) == pytest.approx(row.value, rel=0.05), row.workload
            compared += 1
    assert compared
    costs = PromptCosts(RATES, 100)
    assert costs.ms([(256, 768)] * 64) < costs.ms([(256, 769)] * 64) - 5, "more keys than are gathered"


def test_decode_steps_take_what_was_measured_and_longer_with_more_to_read() -> None:
    costs = StepCosts(RATES)
    for rows, context, ms, _ in RATES.steps:
        assert costs.ms(int(rows), rows * context) == pytest.approx(ms)
    for rows in range(1, MAX_ROWS + 1):
        times = [costs.ms(rows, rows * context) for context in (1, 128, 1000, 5000, 40_000)]
        assert times == sorted(times) and times[0] > 1
    assert costs.ms(9, 9000) == costs.ms(16, 9000), "a step of nine rows is that of the graph for sixteen"


def test_decode_steps_of_rows_that_share_take_what_was_measured_as_workers_run_them() -> None:
    costs, compared = StepCosts(RATES), 0
    for row in results():
        if match := SHARED.fullmatch(row.workload):
            rows, context, prefix = map(int, match.groups())
            num_spared = (rows - 1) * prefix
            reads_once = num_spared * RATES.shape.kv_bytes >= MIN_SPARED_BYTES
            ms = float(row.value if reads_once else row.compared_value)
            assert costs.ms(rows, rows * context, num_spared) == pytest.approx(ms, rel=0.05), row.workload
            assert costs.ms(rows, rows * context, num_spared) < costs.ms(rows, rows * context)
            compared += 1
    assert compared


def test_another_model_takes_what_its_bytes_and_products_say() -> None:
    assert scaled(RATES, RATES.shape, "same").steps == RATES.steps
    known = RATES.shape
    double = ModelShape(**{name: 2 * size for name, size in asdict(known).items()})
    twice = scaled(RATES, double, "twice")
    for name, at in (("prompts", 2), ("steps", 2), ("copies", 1)):
        for before, after in zip(getattr(RATES, name), getattr(twice, name), strict=True):
            assert after[at] == pytest.approx(2 * before[at]) and after[:at] == before[:at]
    for name in ("prefix_kernel_ms", "prefix_kernel_ms_per_1000"):
        assert getattr(twice, name) == 2 * getattr(RATES, name)


def test_the_shape_of_a_model_that_plan_does_not_know_is_refused(tmp_path: Path) -> None:
    assert shape_of(decoder_config(settings(RATES.model))) == RATES.shape
    assert RATES.shape.kv_bytes == 2 * 2 * 36 * 8 * 128
    (tmp_path / "config.json").write_text(json.dumps(settings(RATES.model).values | {"model_type": "gpt2"}))
    with pytest.raises(ConfigError, match=r"config\.json: "):
        read_shape(tmp_path, Target(None))


def test_latents_are_counted_as_cached_and_their_products_as_expanded() -> None:
    shape = shape_of(decoder_config(settings("deepseek-v2-lite")))
    assert (shape.kv_bytes, shape.pair_products) == (27 * 576 * 2, 27 * 16 * (192 + 128) // 2)
    assert shape.expert_share == pytest.approx(6 / 64)


def test_packed_experts_are_read_as_they_are_and_multiplied_in_full() -> None:
    shape = shape_of(decoder_config(settings("gpt-oss-20b")))
    assert shape.weight_bytes == pytest.approx(13.8e9, rel=0.01)
    assert shape.layer_weights == pytest.approx(3.03e9, rel=0.01)
    assert shape.expert_share == pytest.approx(4 / 32)


def test_a_sequence_holds_a_state_whatever_its_length_and_a_step_reads_and_writes_it() -> None:
    shape = shape_of(decoder_config(settings("qwen3.5-4b")))
    assert shape.kv_bytes == 8 * 2 * 4 * 256 * 2
    assert shape.state_bytes == pytest.approx(24 * 32 * 128 * 128 * 4, rel=0.1)
    assert shape.context_bytes(100) == 100 * shape.kv_bytes + shape.state_bytes
    assert shape.moved_bytes(100) == shape.context_bytes(100) + shape.state_bytes
    room = Room(shape, RATES.memory_bytes, 0.5)
    held_bytes = [room.kv_tokens(1, 1) // room.taken(n) * shape.context_bytes(n) for n in (100, TYPICAL_TOKENS)]
    assert held_bytes[0] == pytest.approx(held_bytes[1], rel=0.01), "short texts leave no memory idle"
    assert max(held_bytes) < 0.5 * RATES.memory_bytes


@pytest.mark.parametrize(
    ("model", "fraction", "num_tokens"),
    [("qwen3-4b", 0.45, 346_320), ("qwen3-8b", 0.17, 22_000)],
)
def test_kv_has_the_room_that_benchmarks_readme_says_of_an_h200(model: str, fraction: float, num_tokens: int) -> None:
    shape = shape_of(decoder_config(settings(model)))
    assert Room(shape, RATES.memory_bytes, fraction).kv_tokens(1, 1) == pytest.approx(num_tokens, rel=0.05)


def test_a_shape_is_as_large_as_the_model_that_workers_read() -> None:
    assert costs.MAX_KEYS == MAX_KEYS
    for scheme in ("auto", "fp8"):
        demo = ROOT / "deploy/demo_model"
        config, shape = read_config(demo, scheme), read_shape(demo, Target(None), quantization=scheme)
        for size in ((0, 256), (512, 0), (8192, 64)):
            assert shape.activation_bytes(*size) == config.activation_bytes(*size)
        assert shape.step_bytes == config.step_bytes(1, 2)


def test_layers_with_a_window_keep_and_read_no_more_than_the_window() -> None:
    gemma = shape_of(decoder_config(settings("gemma3-4b")))
    assert (gemma.window, gemma.window_bytes, gemma.kv_bytes) == (1024, 118_784, 20_480)
    assert gemma.context_bytes(1000) == 1000 * (118_784 + 20_480)
    assert gemma.context_bytes(10_000) == 1024 * 118_784 + 10_000 * 20_480
    all_full = replace(
        gemma,
        window=0,
        window_bytes=0,
        window_pairs=0,
        kv_bytes=gemma.kv_bytes + gemma.window_bytes,
        pair_products=gemma.pair_products + gemma.window_pairs,
    )
    ours, other = scaled(RATES, gemma, "gemma"), scaled(RATES, all_full, "other")
    for (rows, context, ms, _), (*_, other_ms, _) in zip(ours.steps, other.steps, strict=True):
        assert ms == pytest.approx(other_ms) if context <= 1024 else ms < other_ms, (rows, context)
    for (tokens, _, ms), (*_, other_ms) in zip(ours.prompts, other.prompts, strict=True):
        assert ms == pytest.approx(other_ms) if tokens <= 1024 else ms < other_ms, tokens
    assert ours.copies[-1][1] < other.copies[-1][1]


@pytest.mark.parametrize("num_tokens", [500, 1024, 4096, 20_000])
@pytest.mark.parametrize("model", ["gemma3-4b", "gemma4-12b", "qwen3-4b"])
def test_as_many_sequences_have_room_as_in_a_pool_divided_by_workers(model: str, num_tokens: int) -> None:
    shape, step_tokens = shape_of(decoder_config(settings(model))), 8192
    room = Room(shape, RATES.memory_bytes)
    assert room.step_tokens == step_tokens
    layout = KVLayout("model", decoder_config(settings(model)).cache_groups(16, "bfloat16"))
    pool_bytes = int(room.kv_tokens(0, 1) * shape.context_bytes(TYPICAL_TOKENS) / TYPICAL_TOKENS)
    pool = PoolShape.within(pool_bytes + step_tokens * shape.window_bytes, layout, TYPICAL_TOKENS, 131_072, step_tokens)
    of_step = tuple(group.num_places(step_tokens) if group.window else 0 for group in layout.groups)
    num_sequences = fitting(pool, num_tokens, of_step).lent
    assert room.kv_tokens(0, 1) // room.taken(num_tokens) == pytest.approx(num_sequences, rel=0.03)


@pytest.mark.parametrize("model", ["qwen3-4b", "gemma3-4b", "qwen3.5-4b"])
def test_keys_and_values_in_fp8_are_of_half_the_bytes_in_steps_and_in_memory(model: str) -> None:
    plain, narrow = shape_of(decoder_config(settings(model))), shape_of(decoder_config(settings(model)), "fp8")
    assert narrow == plain.with_cache("fp8") and plain == plain.with_cache("auto")
    assert (2 * narrow.kv_bytes, 2 * narrow.window_bytes) == (plain.kv_bytes, plain.window_bytes)
    assert narrow.state_bytes == plain.state_bytes
    for before, after in zip(scaled(RATES, plain, "").steps, scaled(RATES, narrow, "").steps, strict=True):
        assert after[2] < before[2]
    with pytest.raises(ConfigError, match="latents in fp8 are not supported"):
        shape_of(decoder_config(settings("deepseek-v2-lite")), "fp8")


@pytest.mark.parametrize("model", ["qwen3-4b", "qwen3-8b", "qwen3-30b-a3b", "deepseek-v2-lite", "qwen3.5-4b"])
def test_weights_in_8_bits_leave_their_bytes_to_kv_and_steps_read_less(model: str) -> None:
    config = decoder_config(settings(model))
    plain, narrow = (replace(config, scheme=scheme) for scheme in ("", "int8"))
    before, after = shape_of(plain), shape_of(narrow)
    saved = before.weight_bytes - after.weight_bytes
    assert saved == pytest.approx(before.read_bytes(10**6) - after.read_bytes(10**6), abs=1) and saved > 0
    assert (before.expert_bytes > after.expert_bytes) == (before.expert_bytes > 0)
    assert after.weight_bytes == pytest.approx(model_bytes(narrow, "bfloat16"), rel=2e-3)
    kept = ("layer_weights", "kv_bytes", "token_bytes", "logit_bytes", "expert_share", "state_bytes")
    assert all(getattr(before, name) == getattr(after, name) for name in kept)
    rooms = [Room(shape, RATES.memory_bytes) for shape in (before, after)]
    assert rooms[1].beside_weights - rooms[0].beside_weights == saved
    num_more = rooms[1].kv_tokens(1, 1) - rooms[0].kv_tokens(1, 1)
    token_bytes = before.context_bytes(TYPICAL_TOKENS) / TYPICAL_TOKENS
    assert num_more == pytest.approx((saved - 2 * after.matrix_bytes) / token_bytes, rel=0.01, abs=2)
    pairs = zip(RATES.steps, scaled(RATES, before, "").steps, scaled(RATES, after, "").steps, strict=True)
    for (rows, context, _, least_ms), (*_, ms, _), (*_, less_ms, _) in pairs:
        known_bytes = RATES.shape.read_bytes(rows) + rows * RATES.shape.moved_bytes(context)
        of_step = before.read_bytes(rows) - after.read_bytes(rows)
        assert ms - less_ms == pytest.approx(least_ms * of_step / known_bytes), "at the measured speed of reading"


def test_prompts_keep_their_time_with_weights_in_8_bits_and_kv_in_fp8_adds_to_them() -> None:
    config = replace(decoder_config(settings("qwen3-8b")), scheme="fp8")
    plain, weights, both = (shape_of(replace(config, scheme="")), shape_of(config), shape_of(config, "fp8"))
    assert scaled(RATES, weights, "").prompts == scaled(RATES, plain, "").prompts
    assert both == weights.with_cache("fp8")
    tokens = [Room(shape, RATES.memory_bytes).kv_tokens(1, 1) for shape in (plain, weights, both)]
    assert tokens[0] < tokens[1] and tokens[2] == pytest.approx(2 * tokens[1], abs=2)
