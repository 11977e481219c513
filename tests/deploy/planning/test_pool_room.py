"""Groups that lend memory hold more contexts, of which no length leaves much of a pool idle."""

from pathlib import Path

import pytest

from benchmarks.pool_room import fitting, main, pool_of
from deploy.bench.results import read_rows

BYTES = 60_000_000_000


@pytest.mark.parametrize("num_tokens", [1024, 4096, 32768])
@pytest.mark.parametrize("model", ["gpt-oss-20b", "qwen3.5-4b", "gemma3-4b"])
def test_contexts_of_any_length_fill_a_pool(model: str, num_tokens: int) -> None:
    shape = pool_of(model, BYTES)
    divided, lent = fitting(shape, num_tokens)
    sizes = zip(shape.layout.groups, shape.layout.most_blocks(num_tokens, 1), strict=True)
    ideal = BYTES / sum(group.block_bytes * count for group, count in sizes)
    assert divided <= lent <= ideal and lent > 0.97 * ideal - 1


def test_rows_tell_both_numbers(tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    assert main(["--models", "qwen3-4b,qwen3.5-4b", "--lengths", "32768", "--results", str(results)]) == 0
    plain, plain_lent, divided, lent = [row.value for row in read_rows(results)]
    assert plain == plain_lent and lent > 1.3 * divided
