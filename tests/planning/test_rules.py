"""Rules of the router and of workers that the simulator has written again: they have the same numbers."""

from common.memory.client.pulse import ASK_S
from common.ops.prompt_attention import MAX_KEYS
from common.settings.config import DecodeSection, PrefillSection, RouterSection
from common.settings.memory_sections import MemorySection
from decode_worker.batch.runner import MIN_SPARED_BYTES, batch_buckets
from deploy.planning.simulation import decode, prefill, routing, simulator
from deploy.planning.step_times import costs
from router.dispatch import binding
from router.placement import route


def test_the_numbers_are_the_same() -> None:
    limits = RouterSection()
    assert (limits.prefill_window, limits.backlog_tokens) == (routing.PREFILL_WINDOW, routing.BACKLOG_TOKENS)
    assert limits.request_timeout_s * 1e3 == simulator.REQUEST_TIMEOUT_MS and decode.LOOK_MS == ASK_S * 1e3
    for name in ("FORESEEN_TOKENS", "MOVED_AT_ONCE", "LOAD_TOKENS"):
        assert getattr(routing, name) == getattr(route, name)
    assert routing.MAX_TRIED == binding.MAX_TRIED
    assert (
        PrefillSection().max_num_seqs,
        PrefillSection().max_mixed_tokens,
    ) == (prefill.MAX_SEQS, prefill.MAX_MIXED_TOKENS)
    assert (MemorySection().decode_reserve, DecodeSection().max_num_seqs) == (prefill.DECODE_RESERVE, costs.MAX_ROWS)
    assert (costs.MIN_SPARED_BYTES, costs.MAX_KEYS) == (MIN_SPARED_BYTES, MAX_KEYS)
    for rows in range(1, costs.MAX_ROWS + 1):
        ours = next(bucket for bucket in costs.BUCKETS if bucket >= rows)
        assert ours == next(bucket for bucket in batch_buckets(costs.MAX_ROWS) if bucket >= rows)
