"""Counters of the sequences assigned to each worker."""

from bisect import insort

from common.wire.values.pool_shape import minus, plus
from router.placement.route import Route


class Ledger:
    """Keeper of `Member.work`; every assigned sequence is uncounted once."""

    def __init__(self) -> None:
        self._turn = 0

    def assign(self, route: Route, num_tokens: int, *, is_trial: bool = False) -> None:
        """Count a sequence sent to a route.

        Args:
            num_tokens: prompt tokens of the sequence.
        """
        for worker in route.workers:
            worker.work.num_unproven += 1
            worker.work.has_trial = is_trial
        self._turn += 1
        route.prefill.last_turn = route.decode.last_turn = self._turn
        prompts, rows = route.prefill.work, route.decode.work
        prompts.outstanding_tokens += num_tokens
        prompts.num_outstanding += 1
        if route.overtakes:
            insort(prompts.overtaking, num_tokens)
        rows.num_assigned += 1
        rows.expected_blocks = plus(rows.expected_blocks, route.expected_blocks)

    def lighten_prompt(self, route: Route, num_tokens: int, num_left: int) -> None:
        """Reduce the counted prompt of an assigned sequence from `num_tokens` to `num_left` tokens to compute."""
        prompts = route.prefill.work
        prompts.outstanding_tokens -= num_tokens - num_left
        if route.overtakes:
            prompts.overtaking.remove(num_tokens)
            insort(prompts.overtaking, num_left)

    def release_prompt(self, route: Route, num_tokens: int) -> None:
        """Uncount the prompt of an assigned sequence, computed or given up."""
        prompts = route.prefill.work
        prompts.outstanding_tokens -= num_tokens
        prompts.num_outstanding -= 1
        if route.overtakes:
            prompts.overtaking.remove(num_tokens)

    def release(self, route: Route) -> None:
        """Uncount a sequence after `release_prompt`."""
        rows = route.decode.work
        rows.num_assigned -= 1
        rows.expected_blocks = minus(rows.expected_blocks, route.expected_blocks)

    def prove(self, route: Route) -> None:
        """Count a sequence as proven because of its progress; ends a trial."""
        for worker in route.workers:
            worker.work.num_unproven -= 1
            worker.work.has_trial = False
