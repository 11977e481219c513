"""Cost of a request at a pair of workers, in prompt tokens: waiting, computing, restoring and moving."""

from functools import cached_property
from typing import NamedTuple

from common.memory.base.copy_costs import is_pull_faster, is_restore_faster, pull_us, restore_us
from common.wire.messages.worker import Role
from common.wire.values.resumption import bytes_to_resume
from router.placement.member import Member
from router.placement.prefix_map import NOTHING, Found, PoolName
from router.placement.route import MOVED_AT_ONCE, Cost, Demand
from router.placement.text_keys import TextKeys
from router.placement.worker_pool import WorkerPool

MAX_HOLDERS = 8
Pair = tuple[Member, Member]
"""A prefill and a decode worker, or a decode worker twice if it does both."""


class Restored(NamedTuple):
    """Part of a prompt copied back from host memory instead of computed."""

    num_tokens: int = 0
    time: float = 0.0  # prompt tokens computed in the same time


class Taken(NamedTuple):
    """Part of a prompt taken from a decode worker's pool instead of computed."""

    num_tokens: int = 0
    time: float = 0.0  # prompt tokens computed in the same time


class Moved(NamedTuple):
    """Part of a prompt without KV in a decode worker's pool."""

    num_tokens: int
    num_bytes: int


class Costs:
    """Costs of a request at any pair; each pool's cached prefix is looked up once.

    Args:
        pool: all workers; prefill workers may take blocks from decode workers among them.
    """

    def __init__(self, demand: Demand, pool: WorkerPool) -> None:
        self._demand, self._pool = demand, pool
        self._found: dict[PoolName, Found] = {}
        self._texts: dict[Member, TextKeys | None] = {}  # by whose layout has keys
        self._prompts: dict[Member, Cost] = {}  # by prefill worker
        self._moved: dict[PoolName, Moved] = {}  # by decode worker's pool

    def of(self, pair: Pair) -> Cost:
        """Return the cost of a pair."""
        prefill, decode = pair
        prompt, load = self.prompt(prefill), decode_load(decode)
        if prefill.pool == decode.pool:
            return prompt._replace(load=load)
        num_moved = self._moved_to(decode).num_tokens
        moving = self.moving(decode, self._pool.paths.rate(prefill, decode))
        return prompt._replace(num_moved=prompt.num_moved + num_moved, moving=prompt.moving + moving, load=load)

    def prompt(self, prefill: Member) -> Cost:
        """Return the cost of computing the prompt at a prefill worker, without decoding."""
        if prefill not in self._prompts and not self._demand.texts:  # nothing to look up
            self._prompts[prefill] = Cost(prefill.work.outstanding_tokens, num_computed=self._demand.num_tokens)
        elif prefill not in self._prompts:
            num_tokens, holder = self._demand.num_tokens, self.holder_for(prefill)
            num_known, restored = self._known_by(prefill), self._restored_for(prefill)
            num_here = num_known + restored.num_tokens
            taken = self._taken(prefill, holder, num_here) if holder else Taken()
            self._prompts[prefill] = Cost(
                num_waiting=prefill.work.outstanding_tokens,
                num_known=num_known,
                num_restored=restored.num_tokens,
                restoring=restored.time,
                num_taken=taken.num_tokens,
                num_computed=num_tokens - num_here - taken.num_tokens,
                num_moved=taken.num_tokens,
                moving=max(taken.num_tokens / MOVED_AT_ONCE, taken.time),
            )
        return self._prompts[prefill]

    def moving(self, decode: Member, gb_per_s: float) -> float:
        """Return the cost of moving the prompt's KV from another pool to a decode worker's: as it takes, if known.

        Blocks that are there already are not moved.
        """
        moved = self._moved_to(decode)
        least = moved.num_tokens / MOVED_AT_ONCE
        if not gb_per_s or not self._token_us:
            return least
        return max(least, pull_us(moved.num_bytes, gb_per_s) / self._token_us)

    def holder_for(self, prefill: Member) -> Member | None:
        """Return the decode worker to take blocks from: one with more than the prefill worker has or restores.

        Of the `MAX_HOLDERS` with most, the one from which taking saves most time, by the speeds known. The prefill
        worker itself decides whether to take the blocks.
        """
        if not (prefill.ready.takes_replies and self._owners):
            return None
        num_here = self._known_by(prefill) + self._restored_for(prefill).num_tokens
        partners, held = self._pool.paths.partners(prefill), list[Member]()
        for owner in self._owners:
            if len(held) == MAX_HOLDERS or self._found_by(prefill, owner, self._demand.num_tokens - 1) <= num_here:
                break
            if owner in partners and owner.pool != prefill.pool:
                held.append(owner)
        return max(held, key=lambda owner: self._saved_us(prefill, owner, num_here), default=None)

    @cached_property
    def _owners(self) -> list[Member]:
        """Decode workers whose pools hold some of the prompt, the most first."""
        if not self._demand.texts:
            return []
        most, decodes = self._demand.num_tokens - 1, [w for w in self._pool if w.ready.role is Role.DECODE]
        found = [(self._found_by(worker, worker, most), worker) for worker in decodes]
        owners = sorted((each for each in found if each[0]), key=lambda each: -each[0])
        return [worker for _, worker in owners]

    def _taken(self, prefill: Member, holder: Member, num_here: int) -> Taken:
        """Return what is taken from the holder's pool, by the rule and the speeds of the prefill worker itself."""
        num_taken = self._found_by(prefill, holder, self._demand.num_tokens - 1) - num_here
        path, speeds, block_size = self._pool.paths.find(prefill, holder), prefill.speeds, prefill.block_size
        if path is None or not path.gb_per_s:
            return Taken()
        num_places = num_taken // block_size
        num_bytes, computing_us = bytes_to_resume(prefill.ready.kv_layout, num_places), num_places * speeds.block_us
        if not is_pull_faster(num_bytes, path.gb_per_s, computing_us, speeds.taking_us):
            return Taken()
        taking_us = pull_us(num_bytes, path.gb_per_s) + speeds.taking_us
        return Taken(num_taken, taking_us / speeds.block_us * block_size)

    def _saved_us(self, prefill: Member, holder: Member, num_here: int) -> float:
        """Return the time saved by taking a holder's blocks, negative if computing is faster, 0 if unknown."""
        rate, block_us = self._pool.paths.rate(prefill, holder), prefill.speeds.block_us
        if not rate or not block_us:
            return 0.0
        num_taken = self._found_by(prefill, holder, self._demand.num_tokens - 1) - num_here
        num_places = num_taken // prefill.block_size
        return num_places * block_us - pull_us(bytes_to_resume(prefill.ready.kv_layout, num_places), rate)

    def _moved_to(self, decode: Member) -> Moved:
        """Return what has to be moved into the decode worker's pool from any other."""
        if decode.pool not in self._moved:
            found, block_size = self._look(decode, decode)
            num_tokens, layout = self._demand.num_tokens, decode.ready.kv_layout
            num_places = -(-num_tokens // decode.block_size)
            num_alike = min(found.num_alike, num_places)
            self._moved[decode.pool] = Moved(
                num_tokens - min(num_alike * block_size, num_tokens), bytes_to_resume(layout, num_places, num_alike)
            )
        return self._moved[decode.pool]

    @cached_property
    def _token_us(self) -> float:
        """Time to compute a prompt token where that is fastest, 0 if unknown: costs of all pairs have one unit."""
        known = [w.speeds.block_us / w.block_size for w in self._pool if w.speeds.block_us]
        return min(known, default=0.0)

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
        if worker not in self._texts:
            is_long = self._demand.num_tokens >= worker.ready.prefix_min_tokens
            self._texts[worker] = self._demand.text_in(worker.ready.kv_layout) if is_long else None
        if (text := self._texts[worker]) is None:
            return NOTHING, 0
        pool = owner.pool
        if (found := self._found.get(pool)) is None:
            most = (self._demand.num_tokens - 1) // worker.block_size
            found = self._found[pool] = self._pool.prefixes.find(pool, text.keys, most)
        return found, worker.block_size


def decode_load(worker: Member) -> float:
    """Return the highest utilization of rows and memory; 1 is full.

    Blocks count if held now or expected to be held, of each group by its share of the memory that the groups divide.
    """
    ready, work = worker.ready, worker.work
    num_free = ready.num_blocks if worker.beat is None else worker.beat.num_free_blocks
    groups = zip(ready.num_blocks, num_free, work.expected_blocks, strict=False)  # a heartbeat is unchecked
    shares = [max(count - free, expected) / max(1, count) for count, free, expected in groups]
    return max(work.num_assigned / max(1, ready.max_num_seqs), sum(shares))
