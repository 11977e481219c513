"""Retrievals of a prompt's missing blocks, mostly of replies, from decode workers' pools if faster than computing.

    asked ──PromptBlocks──▶ pulled into blocks of the prompt ──arrived, sealed──▶ found
      └──nothing, too little, late, lost──┴──────────────────────────────────▶ computed.

The prompt, and other prompts that lack the same blocks, wait for a bounded time. A pull counts only if the connection
to the memory server still stands after the pull.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median

from common.kv.copies import Copies
from common.kv.pool import KVPool
from common.memory.base.copy_costs import is_pull_faster, pull_us
from common.serving.prompts.prefixes import PromptPrefixes
from common.serving.prompts.rate import PromptRate
from common.serving.prompts.requests import Key
from common.serving.worker.peer_servers import PeerServer
from common.wire.messages.memory import PromptBlocks
from common.wire.values.kv_layout import KVLayout
from common.wire.values.packing import unpack_ids
from common.wire.values.resumption import bytes_to_resume, needed
from common.wire.values.step_counts import PullMeter
from prefill_worker.reply_pools import ReplyPool, ReplyPools
from prefill_worker.sequence import PrefillSequence

WAIT_S = 0.5
"""Longest wait of a prompt beside twice the expected copy time; an answer takes about 1 ms unless a server hangs."""
MAX_AT_ONCE = 16
FIRST_OVERHEAD_US = 1000.0
"""Assumed overhead of a retrieval beside the copy, before the first measurement."""
REMEMBERED = 16
"""Retrievals in the median of the overhead."""


class Worth:
    """Choice between retrieving and computing blocks, by the durations of the last retrievals and steps."""

    def __init__(self, rate: PromptRate, layout: KVLayout) -> None:
        self.rate, self.layout = rate, layout
        self._overheads_us: deque[float] = deque([FIRST_OVERHEAD_US], maxlen=REMEMBERED)

    @property
    def taking_us(self) -> float:
        """Median overhead of a retrieval beside the copy, in microseconds."""
        return median(self._overheads_us)

    def is_worth(self, num_places: int, gb_per_s: float) -> bool:
        """Tell whether retrieving the blocks of `num_places` places is faster than computing."""
        computing_us = num_places * self.rate.block_us(self.layout.block_size)
        return is_pull_faster(bytes_to_resume(self.layout, num_places), gb_per_s, computing_us, self.taking_us)

    def add(self, num_places: int, gb_per_s: float, took_s: float) -> None:
        """Record the duration of a retrieval."""
        self._overheads_us.append(max(0.0, took_s - self.copy_s(num_places, gb_per_s)) * 1e6)

    def copy_s(self, num_places: int, gb_per_s: float) -> float:
        """Return the expected time to copy the blocks of `num_places` places."""
        return pull_us(bytes_to_resume(self.layout, num_places), gb_per_s) * 1e-6


@dataclass(slots=True, eq=False)
class Retrieval:
    """Blocks of a text on their way here."""

    key: Key  # the first prompt's
    digests: Sequence[bytes]  # missing blocks
    server: PeerServer
    gb_per_s: float
    begin_s: float
    prompts: list[PrefillSequence]  # waiting; the first has lent the target blocks
    first: int  # place of the first missing block
    targets: list[list[int]]  # blocks of the own pool, by group
    found: PromptBlocks | None = None
    copies: Copies = field(default_factory=Copies)

    @property
    def is_wanted(self) -> bool:
        """Tell whether a live prompt waits for the retrieval."""
        return not all(prompt.ended for prompt in self.prompts)

    @property
    def target_ids(self) -> list[int]:
        """All targets."""
        return list(chain.from_iterable(self.targets))

    def free_found(self) -> None:
        """Free the source blocks, if any."""
        if self.found is not None:
            self.server.peer.free(self.found)


class Retrievals:
    """Owner of blocks being filled from other pools.

    Args:
        pool: the own pool.
        prefixes: lends the blocks of prompts, and is told of arrived blocks.
    """

    def __init__(
        self,
        pool: KVPool,
        reply_pools: ReplyPools,
        prefixes: PromptPrefixes[PrefillSequence],
        worth: Worth,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool, self.reply_pools, self.prefixes, self.worth = pool, reply_pools, prefixes, worth
        self.leases, self.grants, self.layout = prefixes.leases, prefixes.grants, prefixes.layout
        self._clock = clock
        self.under_way: list[Retrieval] = []
        self.late: list[Retrieval] = []  # without waiting prompts, but copies may still write the blocks
        self.silent: set[PeerServer] = set()  # memory servers with a late answer
        self.num_pulled, self.meter = 0, PullMeter()  # blocks since the start; copies
        prefixes.on_grant = self.begin

    @property
    def is_busy(self) -> bool:
        """Tell whether an answer, the end of a copy or a proof may come soon."""
        return bool(self.under_way or self.late or self.reply_pools.is_proving)

    def begin(self, prompt: PrefillSequence) -> None:
        """Begin or join a retrieval of a granted prompt's missing blocks, if a known pool has them and a pull pays."""
        named, prompt.holder = prompt.holder, None
        digests = prompt.lacking(self.prefixes.block_size)
        if named is None or not digests or self.prefixes.is_held_up(prompt):
            return
        if (other := next((each for each in self.under_way if each.digests[0] == digests[0]), None)) is not None:
            self.grants.lend(prompt, self.layout.nothing)
            other.prompts.append(prompt)
            return
        pool = self.reply_pools.find(*named)
        counts = tuple(len(needed(group, len(digests))) for group in self.layout.groups)
        num_free = self.prefixes.checkpoints.num_free
        if pool is None or not self._may_have(pool, len(digests)) or not self.grants.may_lend(prompt, counts, num_free):
            return
        assert pool.server is not None, "who is found is connected"
        targets, first = self.grants.lend(prompt, counts), prompt.beginning.num_sealed
        begun = Retrieval(prompt.key, digests, pool.server, pool.gb_per_s, self._clock(), [prompt], first, targets)
        self.under_way.append(begun)
        begun.server.peer.look_up(*begun.key, digests, first)

    def advance(self) -> None:
        """Drive all retrievals and connections, and free late blocks; call once per turn of the loop."""
        for server, message in self.reply_pools.peers.receive():
            if isinstance(message, PromptBlocks):
                self._receive(server, message)
        for server in self.reply_pools.peers.check(self._uses):
            self.silent.discard(server)
            self.reply_pools.lose(server)
        self.reply_pools.prove_next()
        for each in list(self.under_way):
            self._continue(each)
        for each in [each for each in self.late if each.copies.over()]:
            self.late.remove(each)
            self.leases.free(each.target_ids)
            each.free_found()

    def _may_have(self, pool: ReplyPool, num_blocks: int) -> bool:
        is_free = len(self.under_way) + len(self.late) < MAX_AT_ONCE
        is_answering = pool.server not in self.silent and pool.server is not None and not pool.server.problem
        return is_free and is_answering and self.worth.is_worth(num_blocks, pool.gb_per_s)

    def _receive(self, server: PeerServer, found: PromptBlocks) -> None:
        self.silent.discard(server)
        key, block_ids = (found.request_id, found.attempt), unpack_ids(found.block_ids)
        each = next((each for each in self.under_way if each.key == key and each.server is server), None)
        if each is None or each.found is not None:
            if block_ids:
                server.peer.free(found)
            return
        if self._is_answer(each, found) and each.is_wanted and self.worth.is_worth(found.num_places, each.gb_per_s):
            assert server.pool is not None, "what is proven is mapped"
            each.found = found
            targets = chain.from_iterable(self._filled(each, found.num_places))
            each.copies.start(server.pool, block_ids, self.pool, list(targets))
            return
        if block_ids:
            server.peer.free(found)
        self._end(each)

    def _is_answer(self, each: Retrieval, found: PromptBlocks) -> bool:
        """Tell whether an answer has the blocks of some missing places, and the server still stands."""
        if each.server.problem or each.server.pool is None or not 0 < found.num_places <= len(each.digests):
            return False
        end = each.first + found.num_places
        counts = tuple(len(needed(group, end, each.first)) for group in self.layout.groups)
        return each.server.pool.shape.count(unpack_ids(found.block_ids)) == counts

    def _filled(self, each: Retrieval, num_places: int) -> list[list[int]]:
        """Return the targets of a retrieval's first places, by group."""
        places = (needed(group, each.first + num_places, each.first) for group in self.layout.groups)
        return [of_group[: len(at)] for of_group, at in zip(each.targets, places, strict=True)]

    def _continue(self, each: Retrieval) -> None:
        copy_s = self.worth.copy_s(len(each.digests), each.gb_per_s)
        if each.found is not None and each.copies.over():
            each.server.peer.poll()
            if each.copies.problem or each.server.problem:
                self._end(each)
            else:
                self._arrive(each)
        elif each.server.problem or self._clock() - each.begin_s > WAIT_S + 2 * copy_s:
            if each.found is None:
                self.silent.add(each.server)
            self._end(each)

    def _arrive(self, each: Retrieval) -> None:
        """Seal the arrived blocks, return the blocks to the prompt, and wake other prompts."""
        assert each.found is not None, "it was pulled"
        num_found = each.found.num_places
        sealed = self._filled(each, num_found)
        unfilled = [of_group[len(filled) :] for of_group, filled in zip(each.targets, sealed, strict=True)]
        block_ids = list(chain.from_iterable(sealed))
        self.worth.add(num_found, each.gb_per_s, self._clock() - each.begin_s)
        self.meter.note(each.copies.num_pulls, each.copies.num_bytes, each.copies.seconds)
        self.num_pulled += len(block_ids)
        each.server.peer.free(each.found)
        digests = each.digests[:num_found]
        self.leases.seal(block_ids, list(chain.from_iterable(digests[-len(filled) :] for filled in sealed if filled)))
        first, *others = self._leave(each)
        self.grants.return_lent(first, num_found, sealed, unfilled)
        for prompt in others:
            self.grants.return_nothing(prompt)
        self.prefixes.sealed(set(digests), [prompt for prompt in others if not prompt.ended])

    def _end(self, each: Retrieval) -> None:
        """Give a retrieval up: waiting prompts are computed, in fresh blocks while a copy may still write."""
        first, *others = self._leave(each)
        if each.copies.over():
            self.grants.return_lent(first, 0, [[] for _ in each.targets], each.targets)
            each.free_found()
        else:
            self.late.append(each)
            self.grants.lose_lent(first)
        for prompt in others:
            self.grants.return_nothing(prompt)

    def _leave(self, each: Retrieval) -> list[PrefillSequence]:
        """Remove a retrieval from `under_way`; return the waiting prompts."""
        self.under_way.remove(each)
        return each.prompts

    def _uses(self, server: PeerServer) -> bool:
        return any(each.server is server for each in [*self.under_way, *self.late])
