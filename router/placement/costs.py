"""Cost of a request at a pair of workers, in prompt tokens: waiting, computing, restoring and moving."""

from collections.abc import Set
from typing import NamedTuple

from common.memory.base.copy_costs import is_pull_faster, is_restore_faster, pull_us, restore_us
from common.wire.messages.worker import Role
from common.wire.values.resumption import bytes_to_resume
from router.placement.member import Member
from router.placement.predictions import PoolName
from router.placement.prefix_map import NOTHING, Found
from router.placement.roster import decode_load
from router.placement.route import MOVED_AT_ONCE, Cost, Demand
from router.placement.worker_pool import WorkerPool

MAX_HOLDERS = 8
MAX_AHEAD = 16
"""Pools with most of a prompt, whose workers are looked at before all others."""
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
        pool.roster.update()
        self._demand, self._pool, self._roster = demand, pool, pool.roster
        self._found: dict[PoolName, Found] = {}
        self._held: dict[int, list[PoolName]] = {}  # by tokens there, or in host memory behind; the most first
        self._look()
        self._alike: dict[int, Cost] = {}  # by id of what is found, where nothing can be restored or taken
        self._prompts: dict[Member, Cost] = {}  # by prefill worker, elsewhere
        self._moving: dict[tuple[int, int, float], float] = {}  # by id of what is found, id of the layout, and rate
        self._owners: dict[int, list[Member]] = {}  # by tokens, less than those owners have
        takes = self._held and any(worker.ready.takes_replies for worker in self._roster.prefills)
        self.most_taken = self.most_held(Role.DECODE) if takes else 0
        """The most tokens of the prompt that some prefill worker may take from a decode worker."""
        self.least = demand.num_tokens - next(iter(self._held), 0)
        """No worker would compute fewer tokens of the prompt."""

    def of(self, pair: Pair) -> Cost:
        """Return the cost of a pair."""
        prefill, decode = pair
        num_waiting, prompt, load = prefill.work.outstanding_tokens, self.prompt(prefill), decode_load(decode)
        if prefill.pool == decode.pool:
            return prompt._replace(num_waiting=num_waiting, load=load)
        num_moved = prompt.num_moved + self._moved_to(decode).num_tokens
        moving = prompt.moving + self.moving(decode, self._pool.paths.rate(prefill, decode))
        return prompt._replace(num_waiting=num_waiting, num_moved=num_moved, moving=moving, load=load)

    def prompt(self, prefill: Member) -> Cost:
        """Return the cost of computing the prompt at a prefill worker, without waiting and decoding."""
        found = self._found_for(prefill)
        if (cost := self._alike.get(id(found)) or self._prompts.get(prefill)) is None:
            num_tokens, num_known = self._demand.num_tokens, self._tokens(found.num_there, prefill.block_size)
            if not (found.num_behind or self._owners_of_more(num_known)):
                cost = self._alike[id(found)] = Cost(num_known=num_known, num_computed=num_tokens - num_known)
                return cost
            restored = self._restored_for(prefill, found)
            num_here = num_known + restored.num_tokens
            holder = self._holder(prefill, num_here)
            taken = self._taken(prefill, holder, num_here) if holder else Taken()
            cost = self._prompts[prefill] = Cost(
                num_known=num_known,
                num_restored=restored.num_tokens,
                restoring=restored.time,
                num_taken=taken.num_tokens,
                num_computed=num_tokens - num_here - taken.num_tokens,
                num_moved=taken.num_tokens,
                moving=max(taken.num_tokens / MOVED_AT_ONCE, taken.time),
            )
        return cost

    def moving(self, decode: Member, gb_per_s: float) -> float:
        """Return the cost of moving the prompt's KV from another pool to a decode worker's: as it takes, if known.

        Blocks that are there already are not moved.
        """
        key = id(self._found_for(decode)), id(decode.layout), gb_per_s
        if (cost := self._moving.get(key)) is None:
            moved, token_us = self._moved_to(decode), self._roster.token_us  # of all: costs of all pairs have one unit
            cost = moved.num_tokens / MOVED_AT_ONCE
            if gb_per_s and token_us:
                cost = max(cost, pull_us(moved.num_bytes, gb_per_s) / token_us)
            self._moving[key] = cost
        return cost

    def holder_for(self, prefill: Member) -> Member | None:
        """Return the decode worker to take blocks from: one with more than the prefill worker has or restores."""
        cost = self.prompt(prefill)
        return self._holder(prefill, cost.num_known + cost.num_restored)

    def most_held(self, role: Role) -> int:
        """Return the most tokens of the prompt in a pool of some worker of a role, or in host memory behind."""
        pools = self._roster.by_pool(role).keys()
        return next((tokens for tokens, holding in self._held.items() if not pools.isdisjoint(holding)), 0)

    def ahead(self) -> tuple[Set[Member], float]:
        """Return the prefill workers of the few pools with most of the prompt, and a bound.

        The prompt costs no less than the bound at any other worker, without waiting.
        """
        workers: set[Member] = set()
        prefills, num_tokens, most = self._roster.by_pool(Role.PREFILL), self._demand.num_tokens, 0
        for tokens, pools in self._held.items():
            if len(workers) + len(pools) > MAX_AHEAD:
                most = tokens
                break
            workers.update(worker for pool in pools for worker in prefills.get(pool, ()))
        num_taken = max(0, self.most_taken - most)
        return workers, num_tokens - most - num_taken + num_taken / MOVED_AT_ONCE

    def _look(self) -> None:
        held: dict[int, list[PoolName]] = {}
        for text in self._demand.texts:
            for found, pools in self._pool.prefixes.holding(text, self._demand.num_tokens).items():
                self._found |= dict.fromkeys(pools, found)
                num_tokens = self._tokens(found.num_there + found.num_behind, text.block_size)
                held[num_tokens] = held.get(num_tokens, []) + pools
        self._held = dict(sorted(held.items(), reverse=True))

    def _holder(self, prefill: Member, num_here: int) -> Member | None:
        """Return the best holder for a prefill worker with `num_here` tokens.

        Of the `MAX_HOLDERS` with most, the one from which taking saves most time, by the speeds known. The prefill
        worker itself decides whether to take the blocks.
        """
        if not prefill.ready.takes_replies or self._demand.num_tokens < prefill.ready.prefix_min_tokens:
            return None
        partners, held = self._pool.paths.partners(prefill), list[Member]()
        for owner in self._owners_of_more(num_here):
            if owner in partners and owner.pool != prefill.pool:
                held.append(owner)
                if len(held) == MAX_HOLDERS:
                    break
        return max(held, key=lambda owner: self._saved_us(prefill, owner, num_here), default=None)

    def _taken(self, prefill: Member, holder: Member, num_here: int) -> Taken:
        """Return what is taken from the holder's pool, by the rule and the speeds of the prefill worker itself."""
        num_taken = self._tokens(self._found[holder.pool].num_there, prefill.block_size) - num_here
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
        num_taken = self._tokens(self._found[holder.pool].num_there, prefill.block_size) - num_here
        num_places = num_taken // prefill.block_size
        return num_places * block_us - pull_us(bytes_to_resume(prefill.ready.kv_layout, num_places), rate)

    def _moved_to(self, decode: Member) -> Moved:
        """Return what has to be moved into the decode worker's pool from any other."""
        block_size, num_tokens = decode.block_size, self._demand.num_tokens
        num_places = -(-num_tokens // block_size)
        num_alike = min(self._found_for(decode).num_alike, num_places)
        num_moved = num_tokens - min(num_alike * block_size, num_tokens)
        return Moved(num_moved, bytes_to_resume(decode.layout, num_places, num_alike))

    def _restored_for(self, worker: Member, found: Found) -> Restored:
        """Return tokens restored from host memory by the worker's memory server, none if copying is not worthwhile."""
        block_size = worker.block_size
        num_blocks = self._tokens(found.num_there + found.num_behind, block_size) // block_size - found.num_there
        num_parked = min(found.num_parked, num_blocks)
        if num_parked <= 0 or not is_restore_faster(num_parked, block_size, worker.speeds.block_us, found.copy_us):
            return Restored()
        time = restore_us(num_parked, found.copy_us) / worker.speeds.block_us * block_size
        return Restored(num_blocks * block_size, time)

    def _owners_of_more(self, num_tokens: int) -> list[Member]:
        """Return decode workers whose pools hold more tokens of the prompt, the most first."""
        if num_tokens >= self.most_taken:
            return []
        if num_tokens not in self._owners:
            decodes, found = self._roster.by_pool(Role.DECODE), []
            pools = (pool for most, pools in self._held.items() if most > num_tokens for pool in pools)
            for owner in (owner for pool in pools for owner in decodes.get(pool, ())):
                if (num_there := self._tokens(self._found_for(owner).num_there, owner.block_size)) > num_tokens:
                    found.append((-num_there, owner.number, owner))
            self._owners[num_tokens] = [owner for *_, owner in sorted(found)]
        return self._owners[num_tokens]

    def _found_for(self, worker: Member) -> Found:
        """Return the prompt's cached blocks in a worker's pool; for a short prompt none are looked for."""
        is_long = self._demand.num_tokens >= worker.ready.prefix_min_tokens
        return self._found.get(worker.pool, NOTHING) if is_long else NOTHING

    def _tokens(self, num_places: int, block_size: int) -> int:
        """Return tokens in the first places; at least one token of a prompt is always computed."""
        return min(num_places, (self._demand.num_tokens - 1) // block_size) * block_size
