"""One pool of KV blocks: its memory, who uses it, and who gets blocks of it.

A worker asks for blocks ahead of need, so that no step waits for them, or for all blocks of a prompt. It gets what it
asks for at once and whole, or waits and holds nothing for it: so no two wait for what the other holds. Those that
decode come first, as what they have begun would be lost; prompts leave them a reserve to grow into. While somebody
waits all others are asked to give back what they hold in hand.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from common.memory.blocks.answers import Answer
from common.memory.blocks.index import BlockIndex, OfferKey
from common.memory.devices.backing import Memory
from common.wire.messages.memory import BlocksLeased, KVDeclined, KVReceived, PoolShortage, PromptBlocks, PromptWanted
from common.wire.values.kv_layout import Counts, KVLayout
from common.wire.values.pool_shape import are_enough, minus


@dataclass(frozen=True, slots=True)
class User:
    """A worker, as far as a pool cares."""

    client: int
    worker: tuple[str, int]  # id and epoch
    is_decoding: bool = False
    is_guest: bool = False  # it takes offers to pull them, and leases nothing


WantKey = tuple[int, str, int]
"""(client, request id, attempt); ("", 0) for blocks that are no prompt's."""


@dataclass(slots=True, eq=False)
class Want:
    """Blocks that a client waits for."""

    client: int
    number: int  # first come, first served
    num_blocks: Counts  # those that the keys of a prompt find included
    prompt: PromptWanted | None = None
    num_passed: int = 0  # blocks that others got before it that came later
    is_restoring: bool = False  # what host memory has of the prompt is on its way

    @property
    def key(self) -> WantKey:
        prompt = self.prompt
        return (self.client, "", 0) if prompt is None else (self.client, prompt.request_id, prompt.attempt)

    @property
    def priority(self) -> int:
        """Lower is earlier."""
        return 0 if self.prompt is None else self.prompt.priority


@dataclass(slots=True, eq=False)
class Pool:
    """Memory, who has its blocks, and who wants some."""

    layout: KVLayout
    pool_id: int
    memory: Memory
    index: BlockIndex
    reserve: float  # share that prompts leave to what is being decoded
    users: dict[int, User] = field(default_factory=dict)
    wants: dict[WantKey, Want] = field(default_factory=dict)
    restore: Callable[["Pool", Want], bool] = lambda pool, want: False  # whether what is parked of a prompt comes first
    is_short: bool = False  # as users were told
    num_done: int = 0  # how often blocks were sealed, or have changed hands
    senders: dict[OfferKey, int] = field(default_factory=dict)  # client that made each offer not received yet
    _numbers: Iterator[int] = field(default_factory=count)

    def want(self, client: int, num_blocks: Counts, prompt: PromptWanted | None = None) -> None:
        """Let a client wait for blocks, in place of what it wanted before; it keeps its place."""
        want = Want(client, next(self._numbers), num_blocks, prompt)
        if (known := self.wants.get(want.key)) is not None:
            known.num_blocks = num_blocks
        else:
            self.wants[want.key] = want

    def unwant(self, key: WantKey) -> None:
        """Forget what a client wants, if it still does."""
        self.wants.pop(key, None)

    def forget(self, client: int) -> None:
        """Forget all that a client wants."""
        self.wants = {key: want for key, want in self.wants.items() if want.client != client}

    def received(self, key: OfferKey) -> list[Answer]:
        """Tell who made an offer, if it waits for that, that it was received."""
        sender = self.senders.pop(key, None)
        return [] if sender is None else [Answer(sender, KVReceived(key.request_id, key.attempt))]

    def undelivered(self, keys: Iterable[OfferKey]) -> list[Answer]:
        """Tell who made these offers, if it waits for that, that they are void."""
        senders = ((key, self.senders.pop(key, None)) for key in keys)
        return [Answer(to, KVDeclined(key.request_id, key.attempt)) for key, to in senders if to is not None]

    def drop_user(self, client: int) -> list[Answer]:
        """Let go of a client; offers to it that it has not received are void."""
        self.users.pop(client, None)
        self.forget(client)
        self.senders = {key: sender for key, sender in self.senders.items() if sender != client}
        return self.undelivered([key for key in self.senders if key.client == client])

    def is_waited_for(self, but: int) -> bool:
        """Whether a client other than that waits for blocks."""
        return any(want.client != but for want in self.wants.values())

    def deal(self) -> list[Answer]:
        """Give blocks to those that wait, in order; who wants little may pass who wants much, for a while."""
        answers, available = [], self.index.num_free
        waiting: list[Want] = []
        for want in self._in_order():
            lacking, reserve = self._lacking(want), self._reserve_before(want.client)
            is_next = are_enough(minus(available, reserve), lacking)
            if is_next or (self.may_pass(waiting, lacking) and are_enough(self._num_free(reserve), lacking)):
                if self.restore(self, want):
                    want.is_restoring = True
                else:
                    for other in waiting:
                        other.num_passed += sum(lacking)
                    del self.wants[want.key]
                    answers.append(self._granted(want))
            else:
                waiting.append(want)
            available = minus(available, lacking)
        if self.is_short != bool(waiting):
            self.is_short = bool(waiting)
            users = [user.client for user in self.users.values() if not user.is_guest]
            answers += [Answer(client, PoolShortage(self.is_short)) for client in users]
        return answers

    def _in_order(self) -> list[Want]:
        """Return those that wait: who decodes, and wants least, first; then by priority, first come first."""

        def place(want: Want) -> tuple[bool, int, int]:
            is_decoding = self.users[want.client].is_decoding
            return not is_decoding, sum(want.num_blocks) if is_decoding else want.priority, want.number

        return sorted((want for want in self.wants.values() if not want.is_restoring), key=place)

    def _lacking(self, want: Want) -> Counts:
        """Free blocks, cached ones included, that a want takes: also cached blocks of the prompt that it will read."""
        if want.prompt is None or not want.prompt.keys:
            return want.num_blocks
        return (want.num_blocks[0] - self.index.sealed.num_in_use(want.prompt.keys), *want.num_blocks[1:])

    def _granted(self, want: Want) -> Answer:
        prompt = want.prompt
        if prompt is None:
            leased = self.index.lease(want.client, want.num_blocks)
            return Answer(want.client, BlocksLeased(*packed(leased, self.index.generations(leased))))
        found = self.index.sealed.match(want.client, prompt.keys)
        leased = self.index.lease(want.client, (want.num_blocks[0] - len(found), *want.num_blocks[1:]))
        block_ids = np.concatenate([found, leased])
        blocks = packed(block_ids, self.index.generations(block_ids))
        return Answer(want.client, PromptBlocks(prompt.request_id, prompt.attempt, *blocks, len(found)))

    def may_pass(self, waiting: list[Want], wanted: Counts) -> bool:
        """Whether prompts that wait for much may wait for that longer: for half as many blocks as they want, in all."""
        return not any(self.users[want.client].is_decoding for want in waiting) and all(
            want.num_passed + sum(wanted) <= sum(want.num_blocks) // 2 for want in waiting
        )

    def _num_free(self, reserve: Counts) -> Counts:
        return minus(self.index.num_free, reserve)

    def _reserve_before(self, client: int) -> Counts:
        """Blocks that a client leaves to what is being decoded."""
        index = self.index
        decoding = [user.client for user in self.users.values() if user.is_decoding]
        is_decoding = bool(index.offers) or any(index.holds(client) for client in decoding)
        if client in decoding or not is_decoding:
            return index.shape.layout.nothing
        return tuple(int(self.reserve * count) for count in index.shape.num_blocks)


def packed(block_ids: np.ndarray, generations: np.ndarray) -> tuple[bytes, bytes]:
    """As these travel: ids, [num_blocks] intp, and generations, [num_blocks] int32."""
    return block_ids.astype(np.int32).tobytes(), generations.tobytes()
