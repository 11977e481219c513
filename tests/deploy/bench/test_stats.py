import math

import pytest

from common.base.percentiles import percentile
from deploy.bench.stats import RequestRecord, meets, parse_slo, summarize


def record(sent_s: float, chunk_times_s: list[float], num_output_tokens: int, error: str = "") -> RequestRecord:
    return RequestRecord(
        sent_s=sent_s,
        ended_s=chunk_times_s[-1] + 0.5,
        num_prompt_tokens=10,
        num_output_tokens=num_output_tokens,
        chunk_times_s=chunk_times_s,
        error=error,
    )


def values(records: list[RequestRecord], duration_s: float = 10.0, slo: str = "") -> dict[str, float]:
    figures = summarize(records, duration_s, parse_slo(slo) if slo else {})
    return {figure.name: figure.value for figure in figures}


@pytest.mark.parametrize(("percent", "expected"), [(0, 1.0), (50, 2.5), (90, 3.7), (99, 3.97), (100, 4.0)])
def test_percentile_interpolates(percent: float, expected: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], percent) == pytest.approx(expected)


def test_percentile_of_one_value_and_of_none() -> None:
    assert percentile([7.0], 99) == 7.0
    assert math.isnan(percentile([], 50))


def test_latencies_of_one_request() -> None:
    seen = values([record(1.0, [2.0, 2.1, 2.4], num_output_tokens=3)])
    assert seen["ttft_p50"] == pytest.approx(1000)
    assert seen["tpot_mean"] == pytest.approx(200)
    assert seen["itl_p50"] == pytest.approx(200)
    assert seen["itl_p99"] == pytest.approx(298)
    assert seen["e2e_mean"] == pytest.approx(1900)


def test_the_first_gap_is_one_value_a_request_and_a_part_of_itl() -> None:
    slow_start = record(0.0, [1.0, 1.3, 1.31], num_output_tokens=3)
    fast_start = record(0.0, [1.0, 1.1, 1.9], num_output_tokens=3)
    single = record(0.0, [1.0], num_output_tokens=1)
    seen = values([slow_start, fast_start, single])
    assert seen["first_gap_p50"] == pytest.approx(200)
    assert seen["first_gap_p99"] == pytest.approx(298)
    assert seen["itl_p50"] == pytest.approx(200)
    assert seen["itl_p99"] > 700
    assert math.isnan(values([single])["first_gap_p50"])


def test_several_tokens_in_a_chunk_count_for_tpot_but_not_as_gaps() -> None:
    seen = values([record(0.0, [1.0, 2.0], num_output_tokens=5)])
    assert seen["tpot_p50"] == pytest.approx(250)
    assert seen["itl_p50"] == pytest.approx(1000)


def test_a_single_token_has_no_tpot() -> None:
    seen = values([record(0.0, [1.0], num_output_tokens=1)])
    assert math.isnan(seen["tpot_p50"])
    assert seen["ttft_p50"] == pytest.approx(1000)


def test_throughput_counts_what_succeeded_and_errors_are_counted() -> None:
    good = record(0.0, [1.0, 2.0], num_output_tokens=20)
    bad = record(0.0, [1.0, 2.0], num_output_tokens=20, error="HTTP 500")
    seen = values([good, good, bad])
    assert seen["output_throughput"] == pytest.approx(4.0)
    assert seen["total_throughput"] == pytest.approx(6.0)
    assert seen["request_throughput"] == pytest.approx(0.2)
    assert (seen["requests"], seen["errors"]) == (2, 1)


def test_goodput_needs_every_limit() -> None:
    fast = record(0.0, [0.1, 0.2], num_output_tokens=2)
    slow_first = record(0.0, [0.3, 0.4], num_output_tokens=2)
    slow_rest = record(0.0, [0.1, 0.5], num_output_tokens=2)
    failed = record(0.0, [0.1, 0.2], num_output_tokens=2, error="gone")
    slo = parse_slo("ttft=200,tpot=200")
    assert [meets(each, slo) for each in (fast, slow_first, slow_rest, failed)] == [True, False, False, False]
    assert values([fast, slow_first, slow_rest, failed], 2.0, "ttft=200,tpot=200")["goodput"] == 0.5
    assert not meets(fast, parse_slo("e2e=600"))


@pytest.mark.parametrize("text", ["itl=3", "ttft", "ttft=fast"])
def test_parse_slo_refuses(text: str) -> None:
    with pytest.raises(ValueError):
        parse_slo(text)
