"""Cost of a request at a pair of workers, in prompt tokens: waiting, computing, restoring and moving."""

from functools import cached_property
from typing import NamedTuple

from common.memory.base.copy_costs import is_pull_faster, is_restore_faster, restore_us
from common.wire.messages.worker import Role
from common.wire.values.resumption import bytes_to_resume
from router.placement.member import Member
from router.placement.prefix_map import NOTHING, Found, PoolName
from router.placement.route import LOAD_TOKENS, MOVED_AT_ONCE, Cost, Demand
from router.placement.worker_pool import WorkerPool

Pair = tuple[Member, Member]
"""A prefill and a decode worker, or a decode worker twice if it does both."""


class Restored(NamedTuple):
    """Part of a prompt copied back from host memory instead of computed."""

    num_tokens: int = 0
    time: float = 0.0  # prompt tokens computed in the same time


class Costs:
    """Costs of a request at any pair; each pool's cached prefix is looked up once.

    Args:
        pool: all workers; prefill workers may take blocks from decode workers among them.
    """

    def __init__(self, demand: Demand, pool: WorkerPool) -> None:
        self._demand, self._pool = demand, pool
        self._found: dict[PoolName, Found] = {}
        self._prompts: dict[Member, Cost] = {}  # by prefill worker

    def of(self, pair: Pair) -> Cost:
        """Return the cost of a pair."""
        prefill, decode = pair
        prompt = self.prompt(prefill)
        num_moved = 0 if prefill.pool == decode.pool else self._num_moved_to(decode)
        return prompt._replace(num_moved=prompt.num_moved + num_moved, load=decode_load(decode))

    def prompt(self, prefill: Member) -> Cost:
        """Return the cost of computing the prompt at a prefill worker, without decoding."""
        if prefill not in self._prompts and not self._demand.texts:  # nothing to look up
            self._prompts[prefill] = Cost(prefill.work.outstanding_tokens, num_computed=self._demand.num_tokens)
        elif prefill not in self._prompts:
            num_tokens, holder = self._demand.num_tokens, self.holder_for(prefill)
            num_known, restored = self._known_by(prefill), self._restored_for(prefill)
            num_here = num_known + restored.num_tokens
            num_taken = self._num_taken(prefill, holder, num_here) if holder else 0
            self._prompts[prefill] = Cost(
                num_waiting=prefill.work.outstanding_tokens,
                num_known=num_known,
                num_restored=restored.num_tokens,
                restoring=restored.time,
                num_taken=num_taken,
                num_computed=num_tokens - num_here - num_taken,
                num_moved=num_taken,
            )
        return self._prompts[prefill]

    def decoding(self, decode: Member) -> tuple[float, float]:
        """Return the cost added by a decode worker: its load, and moving KV if the prompt comes from another pool."""
        return LOAD_TOKENS * decode_load(decode), self._num_moved_to(decode) / MOVED_AT_ONCE

    def holder_for(self, prefill: Member) -> Member | None:
        """Return the decode worker with the longest cached prefix, if longer than the prefill worker has or restores.

        The prefill worker itself decides whether to take the blocks.
        """
        if not (prefill.ready.takes_replies and self._owners):
            return None
        num_here = self._known_by(prefill) + self._restored_for(prefill).num_tokens
        partners = self._pool.paths.partners(prefill)
        for owner in self._owners:
            if self._found_by(prefill, owner, self._demand.num_tokens - 1) <= num_here:
                return None
            if owner in partners and owner.pool != prefill.pool:
                return owner
        return None

    @cached_property
    def _owners(self) -> list[Member]:
        """Decode workers whose pools hold some of the prompt, the most first."""
        if not self._demand.texts:
            return []
        most, decodes = self._demand.num_tokens - 1, [w for w in self._pool if w.ready.role is Role.DECODE]
        found = [(self._found_by(worker, worker, most), worker) for worker in decodes]
        owners = sorted((each for each in found if each[0]), key=lambda each: -each[0])
        return [worker for _, worker in owners]

    def _num_taken(self, prefill: Member, holder: Member, num_here: int) -> int:
        """Return tokens taken from the holder's pool, by the rule and the speeds of the prefill worker itself."""
        layout, path = prefill.ready.kv_layout, self._pool.paths.find(prefill, holder)
        num_taken = self._found_by(prefill, holder, self._demand.num_tokens - 1) - num_here
        if path is None or not path.gb_per_s:
            return 0
        num_places, speeds = num_taken // layout.block_size, prefill.speeds
        num_bytes, computing_us = bytes_to_resume(layout, num_places), num_places * speeds.block_us
        return num_taken if is_pull_faster(num_bytes, path.gb_per_s, computing_us, speeds.taking_us) else 0

    def _num_moved_to(self, decode: Member) -> int:
        """Return prompt tokens without KV in the decode worker's pool."""
        found, block_size = self._look(decode, decode)
        return self._demand.num_tokens - min(found.num_alike * block_size, self._demand.num_tokens)

    def _known_by(self, worker: Member) -> int:
        """Return tokens cached in the worker's pool; at least one token of a prompt is always computed."""
        return self._found_by(worker, worker, self._demand.num_tokens - 1)

    def _restored_for(self, worker: Member) -> Restored:
        """Return tokens restored from host memory by the worker's memory server, none if copying is not worthwhile."""
        found, block_size = self._look(worker, worker)
        most = (self._demand.num_tokens - 1) // block_size if block_size else 0
        num_blocks = min(found.num_there + found.num_behind, most) - found.num_there
        num_parked = min(found.num_parked, num_blocks)
        if num_parked <= 0 or not is_restore_faster(num_parked, block_size, worker.speeds.block_us, found.copy_us):
            return Restored()
        time = restore_us(num_parked, found.copy_us) / worker.speeds.block_us * block_size
        return Restored(num_blocks * block_size, time)

    def _found_by(self, worker: Member, owner: Member, most: int) -> int:
        """Return prompt tokens, at most `most`, that `worker` finds in the pool of `owner`."""
        found, block_size = self._look(worker, owner)
        return min(found.num_there, most // block_size) * block_size if block_size else 0

    def _look(self, worker: Member, owner: Member) -> tuple[Found, int]:
        """Return the prompt's cached blocks in the owner's pool, and tokens in a block, 0 without a lookup."""
        text = self._demand.text_in(worker.ready.kv_layout) if self._demand.texts else None
        if text is None or self._demand.num_tokens < worker.ready.prefix_min_tokens:
            return NOTHING, 0
        if owner.pool not in self._found:
            most = (self._demand.num_tokens - 1) // text.block_size
            self._found[owner.pool] = self._pool.prefixes.find(owner.pool, text.keys, most)
        return self._found[owner.pool], text.block_size


def decode_load(worker: Member) -> float:
    """Return the highest utilization of rows and memory; 1 is full.

    Blocks count if held now or expected to be held, of each group by its share of the memory that the groups divide.
    """
    ready, work = worker.ready, worker.work
    num_free = ready.num_blocks if worker.beat is None else worker.beat.num_free_blocks
    groups = zip(ready.num_blocks, num_free, work.expected_blocks, strict=False)  # a heartbeat is unchecked
    shares = [max(count - free, expected) / max(1, count) for count, free, expected in groups]
    return max(work.num_assigned / max(1, ready.max_num_seqs), sum(shares))
