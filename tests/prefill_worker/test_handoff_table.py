from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.kv.blocks import BlockAllocator
from prefill_worker.handoff_table import HandoffTable
from tests.layouts import allocator_of, take

LEASE_S = 30.0


def make() -> tuple[HandoffTable, BlockAllocator]:
    allocator = allocator_of(100)
    return HandoffTable(allocator, LEASE_S), allocator


def test_a_release_frees_once_and_only_for_the_holder() -> None:
    table, allocator = make()
    table.keep(("r", 0), "d", 1, take(allocator, 5), 0.0)
    assert not table.release("other", 1, ("r", 0))
    assert not table.release("d", 2, ("r", 0)), "another incarnation is somebody else"
    assert not table.release("d", 1, ("r", 1)), "another attempt is something else"
    assert table.release("d", 1, ("r", 0))
    assert not table.release("d", 1, ("r", 0)), "a double release is harmless"
    allocator.check([])


def test_a_lease_runs_out_unless_it_is_renewed() -> None:
    table, allocator = make()
    for name in "ab":
        table.keep((name, 0), "d", 1, take(allocator, 5), 0.0)
    assert table.renew("d", 1, [("a", 0), ("unknown", 0)], 20.0) == [("a", 0)]
    assert table.renew("d", 2, [("b", 0)], 20.0) == []
    assert table.expire(LEASE_S + 1) == [("b", 0)]
    assert table.expire(20.0 + LEASE_S + 1) == [("a", 0)]
    allocator.check([])


def test_a_dead_target_frees_what_was_kept_for_it() -> None:
    table, allocator = make()
    table.keep(("a", 0), "d", 1, take(allocator, 5), 0.0)
    table.keep(("b", 0), "d", 2, take(allocator, 5), 0.0)
    assert table.drop_target("d", 1) == [("a", 0)]
    allocator.check(table.blocks())


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order, no block is lost and none has two owners."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.allocator = make()
        self.now_s = 0.0
        self.count = 0

    @rule(holder=st.sampled_from("de"), blocks=st.integers(0, 8))
    def keep(self, holder: str, blocks: int) -> None:
        if self.allocator.has((blocks,)):
            self.count += 1
            self.table.keep((f"r{self.count}", 0), holder, 1, take(self.allocator, blocks), self.now_s)

    @rule(holder=st.sampled_from("de"), number=st.integers(1, 30))
    def release(self, holder: str, number: int) -> None:
        self.table.release(holder, 1, (f"r{number}", 0))

    @rule(holder=st.sampled_from("de"), number=st.integers(1, 30))
    def renew(self, holder: str, number: int) -> None:
        self.table.renew(holder, 1, [(f"r{number}", 0)], self.now_s)

    @rule(step_s=st.floats(0, 40))
    def expire(self, step_s: float) -> None:
        self.now_s += step_s
        self.table.expire(self.now_s)

    @rule(holder=st.sampled_from("de"))
    def drop_target(self, holder: str) -> None:
        self.table.drop_target(holder, 1)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.allocator.check(self.table.blocks())


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=50, stateful_step_count=30)
