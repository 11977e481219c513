"""Whose turn it is waits for the pool that has its beginning, while others find theirs where there is room."""

import pytest
from msgspec.structs import replace

from common.settings.config import RouterSection
from common.wire.values.sampling_params import SamplingParams
from router.dispatch.completion.state import Completion
from router.dispatch.scheduler import MOST_PASSING_TOKENS, starts
from router.dispatch.waiting_queue import WaitingQueue
from router.placement.member import Speeds
from tests.router.placement.test_prefix_map import Pools, keys_of
from tests.support.completions import make_completion

MINE, YOURS, NOBODYS = (list(range(first, first + 4096)) for first in (0, 10_000, 20_000))
"""Beginnings: in the first pool, in the second, in none."""


class Rig:
    """Two pools, and two prefill workers that take nothing from one another's; the first is busy."""

    def __init__(self) -> None:
        self.pools, self.queue = Pools(), WaitingQueue[Completion](RouterSection())
        self.here, _, self.there, _ = self.pools.members
        for gpu, text in enumerate((MINE, YOURS)):
            self.pools.contents(gpu).begin()
            self.pools.contents(gpu).reported.update(keys_of(text).keys)
        for prefill in (self.here, self.there):
            prefill.ready = replace(prefill.ready, takes_replies=False)
        self.here.work.outstanding_tokens = 1 << 20  # no room

    def queue_up(self, name: str, beginning: list[int], priority: int = 0) -> Completion:
        token_ids = [*beginning, *range(-200, 0)]
        completion = make_completion(name, token_ids, SamplingParams(max_tokens=1), priority=priority)
        completion.texts = (keys_of(token_ids),)
        self.queue.add(completion)
        return completion

    def started(self, count: int = 1000) -> list[str]:
        """So many, at most; each takes its place."""
        names = []
        for completion, route in starts(self.queue, self.pools.workers):
            assert route.prefill is self.there
            self.queue.take(completion)
            self.pools.workers.ledger.assign(route, route.cost.num_computed)
            names.append(completion.spec.request_id)
            if len(names) == count:
                break
        return names


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_who_finds_its_beginning_where_there_is_room_passes(rig: Rig) -> None:
    for name, text in (("first", MINE), ("cold", NOBODYS), ("yours", YOURS), ("yours too", YOURS), ("mine", MINE)):
        rig.queue_up(name, text)
    assert rig.started() == ["yours", "yours too", "first", "cold", "mine"], "nobody waits for nobody"


def test_where_its_beginning_can_be_taken_from_there_nobody_passes(rig: Rig) -> None:
    rig.there.ready = replace(rig.there.ready, takes_replies=True)
    rig.there.speeds = Speeds(block_us=1_000_000)
    for name, text in (("first", MINE), ("yours", YOURS)):
        rig.queue_up(name, text)
    assert rig.started() == ["first", "yours"]


def test_where_its_own_place_has_room_it_goes_there_at_once(rig: Rig) -> None:
    rig.queue_up("first", YOURS)
    rig.queue_up("second", YOURS)
    assert rig.started() == ["first", "second"]


def test_nobody_is_passed_by_what_is_less_urgent(rig: Rig) -> None:
    rig.queue_up("yours", YOURS, priority=1)
    rig.queue_up("first", MINE)
    assert rig.started() == ["first", "yours"]


def test_nobody_is_passed_by_more_than_so_much(rig: Rig) -> None:
    rig.queue_up("first", MINE)
    num_passing = -(-MOST_PASSING_TOKENS // 200)
    for number in range(2 * num_passing):
        rig.queue_up(f"yours {number}", YOURS)
    names = rig.started()
    assert names.index("first") == num_passing and len(names) == 2 * num_passing + 1


def test_what_nobody_knows_the_place_of_is_sent_by_turn(rig: Rig) -> None:
    first = rig.queue_up("first", MINE)
    first.texts = ()
    rig.queue_up("yours", YOURS)
    assert rig.started() == ["first", "yours"]
