"""Prompts go where what they begin with lies, unless they would wait there for longer than that saves."""

from collections import Counter

from common.config import NetSection
from common.wire.messages import Role
from router.member import Member
from router.prefix_map import STRIDE_TOKENS, PrefixMap, beginnings_of
from router.route import Demand, Route
from router.worker_pool import WorkerPool
from tests.messages import kv_path, worker_ready

HERE, THERE = ("memory-0", 1), ("memory-1", 1)
TEXT = list(range(5 * STRIDE_TOKENS + 7))


def keys(num_strides: int, first: int = 0) -> list[bytes]:
    return list(beginnings_of(range(first, first + num_strides * STRIDE_TOKENS), b""))


def test_equal_beginnings_have_equal_keys_and_others_have_none_in_common() -> None:
    whole = list(beginnings_of(TEXT, b""))
    assert len(whole) == len(set(whole)) == 5
    assert list(beginnings_of(TEXT[: 3 * STRIDE_TOKENS], b"")) == whole[:3]
    assert not beginnings_of(TEXT[: STRIDE_TOKENS - 1], b"")
    changed = [*TEXT[:STRIDE_TOKENS], -1, *TEXT[STRIDE_TOKENS + 1 :]]
    assert [a == b for a, b in zip(beginnings_of(changed, b""), whole, strict=True)] == [True] + [False] * 4
    assert not set(whole) & {*beginnings_of(TEXT, b"salt")}


def test_a_pool_is_taken_to_have_what_it_was_sent_last_and_has_room_for() -> None:
    known, old, new = PrefixMap(), keys(4), keys(4, first=9999)
    known.note(HERE, old, 6 * STRIDE_TOKENS)
    assert (known.num_known(HERE, old), known.num_known(THERE, old)) == (4 * STRIDE_TOKENS, 0)
    assert known.num_known(HERE, [old[0], new[1]]) == STRIDE_TOKENS
    known.note(HERE, new, 6 * STRIDE_TOKENS)
    assert known.num_known(HERE, new) == 4 * STRIDE_TOKENS
    assert known.num_known(HERE, old) == 2 * STRIDE_TOKENS, "its end went first"
    known.note(HERE, old[:1], 6 * STRIDE_TOKENS)
    known.note(HERE, keys(5, first=5555), 6 * STRIDE_TOKENS)
    assert (known.num_known(HERE, old), known.num_known(HERE, new)) == (STRIDE_TOKENS, 0)
    known.keep({THERE})
    assert known.num_known(HERE, old) == 0


class Pools:
    """Two GPUs, a prefill and a decode worker on each, that share a pool."""

    def __init__(self) -> None:
        self.workers = WorkerPool(NetSection(), prefill_window=100.0)
        self.members = [self._member(f"{role.name}-{n}", role, n) for n in range(2) for role in Role]
        for n in range(2):
            for m in range(2):
                assert self.workers.set_path(kv_path(f"PREFILL-{n}", f"DECODE-{m}"))

    def _member(self, name: str, role: Role, gpu: int) -> Member:
        ready = worker_ready(
            name, role, device=f"cuda:{gpu} GPU-{gpu}", num_blocks=(10_000,), max_model_len=100_000,
            max_batch_tokens=8192, max_num_seqs=64, memory_server_id=f"memory-{gpu}", memory_server_epoch=1,
        )  # fmt: skip
        return self.workers.add(ready, 0.0)

    def send(self, token_ids: list[int]) -> Route:
        route = self.workers.choose(self.demand(token_ids))
        assert route is not None
        self.workers.assign(route, len(token_ids))
        self.workers.note_text(route.prefill, beginnings_of(token_ids, b""))
        return route

    def demand(self, token_ids: list[int]) -> Demand:
        return Demand(len(token_ids), len(token_ids) + 100, beginnings=beginnings_of(token_ids, b""))

    def over(self, route: Route, num_tokens: int) -> None:
        self.workers.release_prompt(route, num_tokens)
        self.workers.release(route)


def test_a_conversation_stays_where_it_was_and_is_decoded_in_the_same_pool() -> None:
    pools, histories = Pools(), [list(range(first, first + 2000)) for first in (0, 10_000, 20_000, 30_000)]
    assert pools.workers.has_choice
    first = [pools.send(history) for history in histories]
    assert Counter(route.prefill.id for route in first) == {"PREFILL-0": 2, "PREFILL-1": 2}
    assert all(route.prefill.pool == route.decode.pool for route in first)
    for route in first:
        pools.over(route, 2000)
    for history, before in [*zip(histories, first, strict=True)][::-1]:
        route = pools.send([*history, *range(300)])
        assert (route.prefill, route.decode) == (before.prefill, before.decode)
        assert route.num_known == 2000 // STRIDE_TOKENS * STRIDE_TOKENS


def test_one_beginning_that_all_share_does_not_draw_all_to_one_place() -> None:
    pools, shared = Pools(), list(range(4096))
    routes = [pools.send([*shared, *range(100 * number, 100 * number + 256)]) for number in range(1, 41)]
    shares = Counter(route.prefill.id for route in routes)
    assert min(shares.values()) >= 18 and len(shares) == 2
    assert sum(route.num_known == 4096 for route in routes) >= 38, "each computes it once"


def test_what_has_a_long_queue_is_left_for_one_that_has_none() -> None:
    pools, text = Pools(), list(range(1024))
    first = pools.send(text)
    pools.over(first, 1024)
    first.prefill.outstanding_tokens = 5000
    route = pools.send([*text, 1])
    assert route.prefill is not first.prefill and route.num_known == 0
