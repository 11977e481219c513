"""Times of prompt steps, learned from a device of one speed."""

import pytest

from common.models.held import read_model
from common.models.sizes.attention import PairProducts
from common.serving.turns.forecast import LONG_WORK, LearnedForecast, Work
from tests.support.guided import DEMO_MODEL

LARGE = Work(8.1e-5)  # a 4B model


def test_a_long_step_teaches_the_times_of_all() -> None:
    forecast = LearnedForecast(LARGE)
    assert not forecast.is_known and forecast.span_ms(0, 8192) == 0.0
    forecast.learn([(8192, 0)], 121.0)
    assert forecast.is_known
    assert forecast.span_ms(0, 8192) == forecast.step_ms([(8192, 0)]) == pytest.approx(121.0)
    assert forecast.span_ms(0, 1024) == pytest.approx(121.0 * 1024 / 8192 * (1 + 8.1e-5 * 512) / (1 + 8.1e-5 * 4096))
    assert forecast.span_ms(24_576, 32_768) > 2 * forecast.span_ms(0, 8192), "behind much context"
    assert forecast.step_ms([(1000, 0), (1000, 5000)]) == pytest.approx(
        forecast.span_ms(0, 1000) + forecast.span_ms(5000, 6000)
    )


def test_short_steps_teach_nothing_and_later_ones_a_fifth() -> None:
    forecast = LearnedForecast(LARGE)
    forecast.learn([(int(LONG_WORK) - 64, 0)], 12.0)
    assert not forecast.is_known
    forecast.learn([(2048, 0)], 20.0)
    forecast.learn([(2048, 0)], 30.0)
    assert forecast.step_ms([(2048, 0)]) == pytest.approx(22.0)
    forecast.learn([(2048, 0)], -3.0)
    assert forecast.step_ms([(2048, 0)]) == pytest.approx(22.0), "no time is below nothing"


def test_a_first_step_that_compiled_is_forgotten_with_the_next_and_a_later_one_hardly_counts() -> None:
    forecast = LearnedForecast(LARGE)
    forecast.learn([(2048, 0)], 4000.0)
    forecast.learn([(2048, 0)], 24.0)
    assert forecast.step_ms([(2048, 0)]) == pytest.approx(24.0)
    forecast.learn([(2048, 0)], 4000.0)
    assert forecast.step_ms([(2048, 0)]) == pytest.approx(24.0 * 1.2)
    for _ in range(8):
        forecast.learn([(2048, 0)], 24.0)
    assert forecast.step_ms([(2048, 0)]) == pytest.approx(24.0, rel=0.05)
    for _ in range(8):
        forecast.learn([(2048, 0)], 96.0)
    assert forecast.step_ms([(2048, 0)]) > 75.0, "a GPU that stays slow is believed"


def test_a_window_bounds_the_pairs_of_its_layers() -> None:
    work = Work(pair=0.0, window_pair=0.01, window=100)
    assert work.span(0, 100) == pytest.approx(100 + 0.01 * 100**2 / 2)
    assert work.span(0, 1100) - work.span(0, 100) == pytest.approx(1000 * (1 + 0.01 * 100)), "linear behind the window"


def test_the_work_of_a_model_is_that_of_its_layers() -> None:
    config = read_model(DEMO_MODEL, "auto")
    assert config.pair_products == PairProducts(len(config.layers) * config.q_heads[0] * config.heads[0].head_dim, 0, 0)
    assert Work.of(config).pair == pytest.approx(2 * config.pair_products.everywhere / config.token_weights)
