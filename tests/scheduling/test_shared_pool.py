"""What short prompts notice of a long one that waits for blocks of a shared pool, in model time."""

import pytest

from common.memory.blocks.pool import Pool
from common.serving.prompts.order import PromptOrder
from tests.scheduling.shared_pool import Asked, SharedPoolSimulation
from tests.scheduling.simulation import FULL_STEP_S, TOKEN_S, percentile

LONG = Asked(2.0, 100_000, 5.0, worker=0)
LOAD = [
    *(Asked(0.0, 8192, 4.0 + n / 2, n % 2) for n in range(12)),  # three quarters of the pool, free one after the other
    LONG,
    *(Asked(2.2 + n / 20, 128, 2.0, n % 2) for n in range(160)),
]


def ttfts() -> tuple[list[list[float]], float]:
    """Of short prompts of the same worker and of another one, and of the long one."""
    seconds = SharedPoolSimulation(2, 8200).run(LOAD)
    pairs = [(asked, ttft_s) for asked, ttft_s in zip(LOAD, seconds, strict=True) if asked.num_tokens == 128]
    short = [[ttft_s for asked, ttft_s in pairs if asked.worker == worker] for worker in (LONG.worker, 1)]
    return short, seconds[LOAD.index(LONG)]


@pytest.mark.medium
def test_short_prompts_pass_a_long_one_that_waits_for_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    short, long_s = ttfts()
    monkeypatch.setattr(Pool, "may_pass", lambda pool, waiting, wanted: False)
    monkeypatch.setattr(PromptOrder, "_let_pass", lambda order, prompt: None)
    short_by_turn, long_by_turn_s = ttfts()
    assert min(percentile(each, 50) for each in short_by_turn) > 1.0, "the load shows nothing"
    assert max(percentile(each, 90) for each in short) <= 3 * FULL_STEP_S
    assert long_s <= 1.5 * long_by_turn_s


def test_what_a_prompt_lacked_is_kept_for_it_while_a_step_takes_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.scheduling.shared_pool.TOKEN_S", 10 * TOKEN_S)
    long, shorter = Asked(0.0, 200_000, 1.0, worker=0), Asked(2.0, 26_000, 1.0, worker=0)
    long_s, shorter_s = SharedPoolSimulation(1, 20_000).run([long, shorter])
    assert shorter_s < long_s / 2, "it overtakes"
