"""What a request would cost at a pair of workers, in prompt tokens: to wait for, to compute, to restore, to move."""

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

from common.memory.base.host_worth import is_worth_copying, restoring_us
from common.memory.base.reply_worth import is_worth_taking
from common.wire.messages.worker import Role
from router.placement.kv_paths import KVPaths
from router.placement.member import Member
from router.placement.prefix_map import NOTHING, Found, PoolName, PrefixMap
from router.placement.route import LOAD_TOKENS, MOVED_AT_ONCE, Cost, Demand

Pair = tuple[Member, Member]
"""A prefill and a decode worker, or one that does both."""


class Restored(NamedTuple):
    """Of a prompt, what comes back from host memory before it is computed."""

    num_tokens: int = 0
    time: float = 0.0  # as many tokens take to compute


class Costs:
    """Of one request at any pair; what lies where is looked up once a pool.

    Args:
        workers: all, some of which prefill workers take blocks from by these paths.
    """

    def __init__(self, demand: Demand, prefixes: PrefixMap, paths: KVPaths, workers: Iterable[Member]) -> None:
        self._demand, self._prefixes, self._paths, self._workers = demand, prefixes, paths, workers
        self._found: dict[PoolName, Found] = {}
        self._prompts: dict[Member, Cost] = {}  # by prefill worker

    def of(self, pair: Pair) -> Cost:
        prefill, decode = pair
        prompt = self.prompt(prefill)
        num_moved = 0 if prefill.pool == decode.pool else self._num_moved_to(decode)
        return prompt._replace(num_moved=prompt.num_moved + num_moved, load=decode.decode_load)

    def prompt(self, prefill: Member) -> Cost:
        """Of computing it there, whoever decodes then."""
        if prefill not in self._prompts:
            num_tokens, holder = self._demand.num_tokens, self.holder_for(prefill)
            num_known, restored = self._known_by(prefill), self._restored_for(prefill)
            num_here = num_known + restored.num_tokens
            num_taken = self._num_taken(prefill, holder, num_here) if holder else 0
            self._prompts[prefill] = Cost(
                num_waiting=prefill.outstanding_tokens,
                num_known=num_known,
                num_restored=restored.num_tokens,
                restoring=restored.time,
                num_taken=num_taken,
                num_computed=num_tokens - num_here - num_taken,
                num_moved=num_taken,
            )
        return self._prompts[prefill]

    def decoding(self, decode: Member) -> tuple[float, float]:
        """What it adds to that to decode it there, and what if it comes from another pool."""
        return LOAD_TOKENS * decode.decode_load, self._num_moved_to(decode) / MOVED_AT_ONCE

    def holder_for(self, prefill: Member) -> Member | None:
        """A decode worker whose pool has the most of the prompt, more than the prefill worker's has or gets back.

        Whether to take it from there it sees when it is asked for.
        """
        if not (self._owners and prefill.ready.takes_replies):
            return None
        num_here = self._known_by(prefill) + self._restored_for(prefill).num_tokens
        partners = self._paths.partners(prefill)
        for owner in self._owners:
            if self._found_by(prefill, owner, self._demand.num_tokens - 1) <= num_here:
                return None
            if owner in partners and owner.pool != prefill.pool:
                return owner
        return None

    @cached_property
    def _owners(self) -> list[Member]:
        """Decode workers whose pools have something of the prompt, the most first."""
        if not self._demand.texts:
            return []
        most, decodes = self._demand.num_tokens - 1, [w for w in self._workers if w.ready.role is Role.DECODE]
        found = [(self._found_by(worker, worker, most), worker) for worker in decodes]
        owners = sorted((each for each in found if each[0]), key=lambda each: -each[0])
        return [worker for _, worker in owners]

    def _num_taken(self, prefill: Member, holder: Member, num_here: int) -> int:
        """Tokens that the prefill worker takes from there, by its own rule, as it tells of itself."""
        group, path = prefill.ready.kv_layout.groups[0], self._paths.find(prefill, holder)
        num_taken = self._found_by(prefill, holder, self._demand.num_tokens - 1) - num_here
        worth = num_taken // group.block_size, group.block_bytes
        if path is None or not path.gb_per_s:
            return 0
        return num_taken if is_worth_taking(*worth, path.gb_per_s, prefill.block_us, prefill.taking_us) else 0

    def _num_moved_to(self, decode: Member) -> int:
        """Of its KV, tokens that are not in that decode worker's pool."""
        return self._demand.num_tokens - self._found_by(decode, decode, self._demand.num_tokens)

    def _known_by(self, worker: Member) -> int:
        """Tokens that are not computed, as they are in its pool; one is."""
        return self._found_by(worker, worker, self._demand.num_tokens - 1)

    def _restored_for(self, worker: Member) -> Restored:
        """What its memory server copies back for it, if it does."""
        found, block_size = self._look(worker, worker)
        most = (self._demand.num_tokens - 1) // block_size if block_size else 0
        num_blocks = min(found.num_there + found.num_behind, most) - found.num_there
        num_parked = min(found.num_parked, num_blocks)
        if num_parked <= 0 or not is_worth_copying(num_parked, block_size, worker.block_us, found.copy_us):
            return Restored()
        time = restoring_us(num_parked, found.copy_us) / worker.block_us * block_size
        return Restored(num_blocks * block_size, time)

    def _found_by(self, worker: Member, owner: Member, most: int) -> int:
        """Tokens of its prompt, at most so many, that a worker finds in the pool of another, or in its own."""
        found, block_size = self._look(worker, owner)
        return min(found.num_there, most // block_size) * block_size if block_size else 0

    def _look(self, worker: Member, owner: Member) -> tuple[Found, int]:
        """What a pool has of its prompt, and of how many tokens each block is; 0 if the worker looks nothing up."""
        text = self._demand.text_in(worker.ready.kv_layout) if self._demand.texts else None
        if text is None or self._demand.num_tokens < worker.ready.prefix_min_tokens:
            return NOTHING, 0
        if owner.pool not in self._found:
            self._found[owner.pool] = self._prefixes.find(owner.pool, text.keys)
        return self._found[owner.pool], text.block_size
