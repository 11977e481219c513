"""What is counted and timed of completions, with a clock moved by hand."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from common.base.errors import ErrorCode, RequestError
from common.wire.messages.worker import Role
from router.dispatch.completion.journey import Phase
from router.dispatch.completion.state import Completion, State
from router.dispatch.metrics import ITL_BOUNDS_S, PHASE_BOUNDS_S, TTFT_BOUNDS_S, Metrics
from router.observe.fleet_metrics import BEAT_GAUGES
from tests.router.bench import LENGTH, Bench
from tests.support.messages import heartbeat

NAME = "baton_inter_token_latency_seconds"
gaps = st.lists(st.one_of(st.floats(0, 5), st.sampled_from(ITL_BOUNDS_S)), max_size=40)

VLLM_LATENCY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
VLLM_ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
VLLM_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip


@given(gaps=gaps)
def test_gaps_are_counted_as_the_library_counts_them(gaps: list[float]) -> None:
    registry, metrics = CollectorRegistry(), Metrics()
    library = Histogram(NAME, "token to token", buckets=ITL_BOUNDS_S, registry=registry)
    for gap_s in gaps:
        library.observe(gap_s)
        metrics.tokens.add_gap(gap_s)
        metrics.tokens.num_generated += 1
    lines = generate_latest(metrics.registry).decode().splitlines()
    expected = [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
    assert [line for line in lines if NAME in line and "_created" not in line] == expected
    assert f"baton_generation_tokens_total {float(len(gaps))}" in lines


def test_a_dashboard_made_for_vllm_finds_each_of_its_bounds() -> None:
    assert set(VLLM_TTFT_S) <= set(TTFT_BOUNDS_S)
    assert set(VLLM_ITL_S) <= set(ITL_BOUNDS_S)
    assert set(VLLM_LATENCY_S) <= set(PHASE_BOUNDS_S)


def value(bench: Bench, name: str, **labels: str) -> float:
    return bench.metrics.registry.get_sample_value(f"baton_{name}", labels) or 0.0


def in_phases(bench: Bench) -> dict[str, float]:
    counts = {phase.value: value(bench, "requests_in_phase", phase=phase.value) for phase in Phase}
    return {phase: count for phase, count in counts.items() if count}


def walked(bench: Bench, completion: Completion, index: int = 0) -> None:
    """One second to its first token, two to the next, four to the third."""
    prefill, decode = bench.route(completion).prefill, bench.route(completion).decode
    for seconds, worker in ((1, prefill), (2, decode), (4, decode)):
        bench.now_s += seconds
        bench.token(worker, completion, index, 1, LENGTH if index == completion.spec.sampling.max_tokens - 1 else 0)
        index += 1


def test_each_phase_has_the_time_that_passed_in_it() -> None:
    bench = Bench(num_decode=0)
    completion = bench.submit(max_tokens=3)
    assert in_phases(bench) == {"queued": 1}
    bench.now_s += 8
    bench.join("d0", Role.DECODE)
    assert in_phases(bench) == {"prefill": 1}
    walked(bench, completion)
    assert in_phases(bench) == {}
    times = {phase.value: value(bench, "request_phase_seconds_sum", phase=phase.value) for phase in Phase}
    assert times == {"queued": 8, "prefill": 1, "handoff": 2, "decode": 4}
    assert value(bench, "handoff_seconds_sum", transport="shm") == 2
    assert value(bench, "time_to_first_token_seconds_sum") == 9
    assert value(bench, "time_per_output_token_seconds_sum") == 3
    assert value(bench, "e2e_request_latency_seconds_sum") == 15
    assert value(bench, "request_inference_seconds_sum") == 7
    assert value(bench, "request_output_seconds_sum") == 6
    assert value(bench, "request_prompt_tokens_sum") == 4
    assert value(bench, "request_generation_tokens_sum") == 3
    assert value(bench, "requests_total", outcome="length") == 1


def test_a_replay_goes_through_the_phases_again_and_they_add_up() -> None:
    bench = Bench()
    completion = bench.submit(max_tokens=6)
    walked(bench, completion)
    bench.now_s += 16
    bench.fail(bench.decodes[0], completion, ErrorCode.PREEMPTED)
    assert in_phases(bench) == {"prefill": 1}
    walked(bench, completion, index=3)
    assert completion.state is State.FINISHED
    times = {phase.value: value(bench, "request_phase_seconds_sum", phase=phase.value) for phase in Phase}
    assert times == {"queued": 0, "prefill": 2, "handoff": 4, "decode": 4 + 16 + 4}
    assert value(bench, "replays_total", reason="preempted") == 1
    assert value(bench, "request_phase_seconds_count", phase="decode") == 1


def test_who_leaves_is_counted_by_how_far_the_request_was() -> None:
    bench = Bench(num_decode=0)
    queued = bench.submit()
    bench.dispatcher.abort(queued)
    bench.join("d0", Role.DECODE)
    prefilling, handed_over, decoding = (bench.submit() for _ in range(3))
    bench.token(bench.prefills[0], handed_over, 0, 1)
    walked(bench, decoding)
    assert in_phases(bench) == {"prefill": 1, "handoff": 1, "decode": 1}
    bench.dispatcher.abort(prefilling, handed_over, decoding)
    assert in_phases(bench) == {}
    assert [value(bench, "aborts_total", phase=phase.value) for phase in Phase] == [1, 1, 1, 1]
    assert value(bench, "requests_total", outcome="aborted") == 4


def test_failures_are_counted_by_their_codes_and_lost_handoffs_by_their_way() -> None:
    bench = Bench()
    completion = bench.submit()
    bench.fail(bench.decodes[0], completion, ErrorCode.HANDOFF_LOST)
    assert value(bench, "handoff_failures_total", transport="shm") == 1
    assert value(bench, "replays_total", reason="handoff_lost") == 1
    bench.dispatcher.fail_all(RequestError("no", code="server_draining", status=503))
    assert value(bench, "request_failures_total", code="server_draining") == 1
    assert value(bench, "requests_total", outcome="failed") == 1
    assert in_phases(bench) == {}


def test_a_worker_that_does_both_hands_nothing_over() -> None:
    bench = Bench(num_prefill=0, num_decode=0)
    worker = bench.join("d0", Role.DECODE, transport="none")
    completion = bench.submit(max_tokens=3)
    for index in range(3):
        bench.now_s += 1
        bench.token(worker, completion, index, 1, LENGTH if index == 2 else 0)
    times = {phase.value: value(bench, "request_phase_seconds_sum", phase=phase.value) for phase in Phase}
    assert times == {"queued": 0, "prefill": 1, "handoff": 0, "decode": 2}
    assert value(bench, "request_phase_seconds_count", phase="handoff") == 0


def test_paused_sequences_of_a_worker_are_told() -> None:
    _, told = BEAT_GAUGES["paused"]
    assert told(heartbeat("d0", num_running=5, num_paused=2)) == 2
