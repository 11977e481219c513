"""The choice of a pair by the formula alone: every pair is looked at, and every pool for every worker."""

from dataclasses import dataclass

from common.memory.base.copy_costs import is_pull_faster, is_restore_faster, pull_us, restore_us
from common.wire.messages.worker import Role
from common.wire.values.resumption import bytes_to_resume
from router.placement.choice import has_room
from router.placement.costs import MAX_HOLDERS, Pair
from router.placement.member import NO_TRANSPORT, Member
from router.placement.prefix_map import NOTHING, Found
from router.placement.roster import decode_load
from router.placement.route import LOAD_TOKENS, MOVED_AT_ONCE, Cost, Demand
from router.placement.worker_pool import WorkerPool


@dataclass
class FullScan:
    """All that is chosen for a demand: `pair` of least `cost`, of `num_pairs`, with `num_wasted` tokens."""

    pool: WorkerPool
    demand: Demand
    overtakes: bool = False

    def __post_init__(self) -> None:
        self._prompts: dict[Member, Cost] = {}
        decodes = [w for w in self.pool if w.ready.role is Role.DECODE and self._takes(w, self.demand.max_total_tokens)]
        decodes = [worker for worker in decodes if self._is_open(worker)]
        fitting = [w for w in self.pool if w.ready.role is Role.PREFILL and self._takes(w, self.demand.num_tokens)]
        able = [prefill for prefill in fitting if any(self.pool.paths.is_proven(prefill, each) for each in decodes)]
        usable = [(prefill, each) for prefill in able if self._is_open(prefill) for each in decodes]
        usable = [
            pair for pair in usable if self.pool.paths.is_proven(*pair) and pair[1].ready.transport != NO_TRANSPORT
        ]
        usable += [(each, each) for each in decodes if each.ready.transport == NO_TRANSPORT or not able]
        pairs = [pair for pair in usable if has_room(self.pool, pair[0], self.demand, overtakes=self.overtakes)]
        self.num_pairs, self.pair = len(pairs), min(pairs, key=self._order, default=None)
        if self.pair is not None:
            self.cost = self.cost_of(self.pair)
            self.num_wasted = self.cost.num_computed - min(self.prompt(prefill).num_computed for prefill, _ in usable)

    def _takes(self, worker: Member, num_tokens: int) -> bool:
        takes_part = worker.ready.role is Role.DECODE or worker.ready.transport != NO_TRANSPORT
        return takes_part and not (worker.draining or worker.in_reserve) and num_tokens <= worker.ready.max_model_len

    def _is_open(self, worker: Member) -> bool:
        work = worker.work
        return not (worker.silent or work.has_trial or (self.demand.is_trial and work.num_unproven))

    def _order(self, pair: Pair) -> tuple[bool, bool, float, int, int, bool, int, int]:
        prefill, decode = pair
        are_avoided = decode is self.demand.avoided, prefill is self.demand.avoided
        prompt, moving = self.prompt(prefill).total, self.moving(pair)
        cost = prompt + LOAD_TOKENS * decode_load(decode) + moving
        turns = decode.last_turn, prefill.last_turn
        return *are_avoided, cost, *turns, prefill is not decode, decode.number, prefill.number

    def cost_of(self, pair: Pair) -> Cost:
        prefill, decode = pair
        prompt, num_moved = self.prompt(prefill), 0
        if prefill.pool != decode.pool:
            block_size = decode.block_size
            num_moved = max(0, self.demand.num_tokens - self._found(decode, decode).num_alike * block_size)
        return prompt._replace(
            num_moved=prompt.num_moved + num_moved, moving=prompt.moving + self.moving(pair), load=decode_load(decode)
        )

    def moving(self, pair: Pair) -> float:
        prefill, decode = pair
        if prefill.pool == decode.pool:
            return 0.0
        num_places, block_size = -(-self.demand.num_tokens // decode.block_size), decode.block_size
        num_alike = min(self._found(decode, decode).num_alike, num_places)
        least = max(0, self.demand.num_tokens - num_alike * block_size) / MOVED_AT_ONCE
        token_us = min((w.speeds.block_us / w.block_size for w in self.pool if w.speeds.block_us), default=0.0)
        rate = self.pool.paths.rate(prefill, decode)
        num_bytes = bytes_to_resume(decode.ready.kv_layout, num_places, num_alike)
        return max(least, pull_us(num_bytes, rate) / token_us) if rate and token_us else least

    def prompt(self, prefill: Member) -> Cost:
        if prefill not in self._prompts:
            self._prompts[prefill] = self._prompt(prefill)
        return self._prompts[prefill]

    def _prompt(self, prefill: Member) -> Cost:
        num_known, (num_restored, restoring) = self._known(prefill, prefill), self._restored(prefill)
        num_here = num_known + num_restored
        num_taken, taking = self._taken(prefill, num_here)
        return Cost(
            num_waiting=prefill.work.outstanding_tokens,
            num_known=num_known,
            num_restored=num_restored,
            restoring=restoring,
            num_taken=num_taken,
            num_computed=self.demand.num_tokens - num_here - num_taken,
            num_moved=num_taken,
            moving=max(num_taken / MOVED_AT_ONCE, taking),
        )

    def holder(self, prefill: Member) -> Member | None:
        if not prefill.ready.takes_replies:
            return None
        num_here = self._known(prefill, prefill) + self._restored(prefill)[0]
        held = [w for w in self.pool if w.ready.role is Role.DECODE and self.pool.paths.is_proven(prefill, w)]
        held = [w for w in held if w.pool != prefill.pool and self._known(prefill, w) > num_here]
        held.sort(key=lambda owner: -self._known(prefill, owner))
        return max(held[:MAX_HOLDERS], key=lambda owner: self._saved_us(prefill, owner, num_here), default=None)

    def _taken(self, prefill: Member, num_here: int) -> tuple[int, float]:
        holder, speeds, layout = self.holder(prefill), prefill.speeds, prefill.ready.kv_layout
        path = self.pool.paths.find(prefill, holder) if holder is not None else None
        if holder is None or path is None or not path.gb_per_s:
            return 0, 0.0
        num_taken = self._known(prefill, holder) - num_here
        num_places = num_taken // prefill.block_size
        num_bytes = bytes_to_resume(layout, num_places)
        if not is_pull_faster(num_bytes, path.gb_per_s, num_places * speeds.block_us, speeds.taking_us):
            return 0, 0.0
        return num_taken, (pull_us(num_bytes, path.gb_per_s) + speeds.taking_us) / speeds.block_us * prefill.block_size

    def _saved_us(self, prefill: Member, holder: Member, num_here: int) -> float:
        rate, block_us = self.pool.paths.rate(prefill, holder), prefill.speeds.block_us
        num_places = (self._known(prefill, holder) - num_here) // prefill.block_size
        num_bytes = bytes_to_resume(prefill.ready.kv_layout, num_places)
        return num_places * block_us - pull_us(num_bytes, rate) if rate and block_us else 0.0

    def _restored(self, worker: Member) -> tuple[int, float]:
        found, size, block_us = self._found(worker, worker), worker.block_size, worker.speeds.block_us
        num_blocks = min(found.num_there + found.num_behind, self._most(worker)) - found.num_there
        num_parked = min(found.num_parked, num_blocks)
        if num_parked <= 0 or not is_restore_faster(num_parked, size, block_us, found.copy_us):
            return 0, 0.0
        return num_blocks * size, restore_us(num_parked, found.copy_us) / block_us * size

    def _known(self, worker: Member, owner: Member) -> int:
        return min(self._found(worker, owner).num_there, self._most(worker)) * worker.block_size

    def _most(self, worker: Member) -> int:
        return (self.demand.num_tokens - 1) // worker.block_size

    def _found(self, worker: Member, owner: Member) -> Found:
        text = self.demand.text_in(worker.ready.kv_layout)
        if text is None or self.demand.num_tokens < worker.ready.prefix_min_tokens:
            return NOTHING
        return self.pool.prefixes.find(owner.pool, text.keys, self._most(worker))
