from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from router.metrics import ITL_BUCKETS_S, Metrics

NAME = "baton_inter_token_latency_seconds"
gaps = st.lists(st.one_of(st.floats(0, 5), st.sampled_from(ITL_BUCKETS_S)), max_size=40)


@given(gaps=gaps)
def test_gaps_are_counted_as_the_library_counts_them(gaps: list[float]) -> None:
    registry, metrics = CollectorRegistry(), Metrics()
    library = Histogram(NAME, "token to token", buckets=ITL_BUCKETS_S, registry=registry)
    for gap_s in gaps:
        library.observe(gap_s)
        metrics.tokens.note_gap(gap_s)
        metrics.tokens.num_generated += 1
    lines = metrics.render().decode().splitlines()
    expected = [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
    assert [line for line in lines if NAME in line and "_created" not in line] == expected
    assert f"baton_generation_tokens_total {float(len(gaps))}" in lines
