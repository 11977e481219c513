"""A pool of KV blocks: memory, users, and the order in which clients get blocks.

A worker asks for blocks ahead of need, so no step waits. A prefill worker asks for all blocks of a prompt at once. Such
a want is granted at once and whole, or waits and holds nothing. So no two clients wait for each other's blocks.
Decoding clients come first, because interrupted work would be lost; prompts leave them a reserve. While a client waits,
all others are asked to give back spare blocks.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from itertools import count
from typing import NamedTuple

import numpy as np

from common.memory.blocks.answers import Answer
from common.memory.blocks.index import BlockIndex
from common.memory.blocks.offers import OfferKey
from common.memory.blocks.sealed import CachedPrefix
from common.memory.devices.backing import Memory
from common.wire.messages.memory import (
    BlocksLeased,
    KVDeclined,
    KVReceived,
    PoolRegion,
    PoolShortage,
    PromptBlocks,
    PromptWanted,
)
from common.wire.values.kv_layout import Counts, KVLayout
from common.wire.values.pool_shape import minus, plus
from common.wire.values.slabs import Room


@dataclass(frozen=True, slots=True)
class User:
    """A worker that uses a pool."""

    client: int
    worker: tuple[str, int]  # id and epoch
    is_decoding: bool = False
    is_peer: bool = False  # accepts offers and reads blocks, but leases none


WantKey = tuple[int, str, int]
"""(client, request id, attempt); ("", 0) for blocks that belong to no prompt."""


@dataclass(slots=True, eq=False)
class Want:
    """Blocks that a client waits for."""

    client: int
    number: int  # order of arrival
    num_blocks: Counts  # includes blocks found by the prompt's keys in append-only groups
    prompt: PromptWanted | None = None
    num_passed: int = 0  # blocks granted to later wants
    is_restoring: bool = False  # blocks are on their way from host memory

    @property
    def key(self) -> WantKey:
        prompt = self.prompt
        return (self.client, "", 0) if prompt is None else (self.client, prompt.request_id, prompt.attempt)

    @property
    def priority(self) -> int:
        """Priority of the prompt; lower is earlier."""
        return 0 if self.prompt is None else self.prompt.priority


@dataclass(slots=True, eq=False)
class Pool:
    """Memory, block index, users and waiting clients of a pool."""

    layout: KVLayout
    pool_id: int
    memory: Memory
    index: BlockIndex
    reserve: float  # share of blocks that prompts leave to decoding
    users: dict[int, User] = field(default_factory=dict)
    wants: dict[WantKey, Want] = field(default_factory=dict)
    restore: Callable[["Pool", Want], bool] = lambda pool, want: False  # begins a restore
    is_short: bool = False  # as last told to users
    num_done: int = 0  # number of seals and changes of hands
    senders: dict[OfferKey, int] = field(default_factory=dict)  # sender of each offer not received yet
    _numbers: Iterator[int] = field(default_factory=count)

    def add_user(self, user: User) -> Answer:
        """Let a client use the pool; return the pool's memory, for the client."""
        self.users[user.client] = user
        shape = self.index.shape
        region = PoolRegion(self.pool_id, self.memory.handle, shape.num_blocks, shape.floor)
        return Answer(user.client, region, self.memory.descriptor)

    def want(self, client: int, num_blocks: Counts, prompt: PromptWanted | None = None) -> None:
        """Let a client wait for blocks. A new want of equal key replaces the earlier want, and keeps its place."""
        want = Want(client, next(self._numbers), num_blocks, prompt)
        if (known := self.wants.get(want.key)) is not None:
            known.num_blocks = num_blocks
        else:
            self.wants[want.key] = want

    def received(self, key: OfferKey) -> list[Answer]:
        """Return an answer to the sender of an offer, once: the offer was received."""
        sender = self.senders.pop(key, None)
        return [] if sender is None else [Answer(sender, KVReceived(key.request_id, key.attempt))]

    def undelivered(self, keys: Iterable[OfferKey]) -> list[Answer]:
        """Return answers to the senders of offers, if not received yet: the offers are void."""
        senders = ((key, self.senders.pop(key, None)) for key in keys)
        return [Answer(to, KVDeclined(key.request_id, key.attempt)) for key, to in senders if to is not None]

    def drop_user(self, client: int) -> list[Answer]:
        """Remove a client; offers to the client are void if not received."""
        self.users.pop(client, None)
        self.wants = {key: want for key, want in self.wants.items() if want.client != client}
        self.senders = {key: sender for key, sender in self.senders.items() if sender != client}
        return self.undelivered([key for key in self.senders if key.client == client])

    def holds_up_others(self, client: int) -> bool:
        """Tell whether others wait for blocks while this client holds blocks or undecided offers."""
        holds = self.index.leases.holds(client) or any(key.client == client for key in self.index.offers)
        return holds and any(want.client != client for want in self.wants.values())

    def grant(self) -> list[Answer]:
        """Grant wants in order; a small want may pass larger ones for a while."""
        answers: list[Answer] = []
        waiting: list[Want] = []
        ahead = Ahead(self.index)
        for want in self._in_order():
            due = _due(self.index, want)
            lacking, reserve = _lacking(self.index, due), self._reserve_before(want.client)
            is_free = not any(lacking)
            has_room = is_free or self._fits(self.index.slabs.room, due, reserve)
            is_next = is_free or (has_room and self._fits(ahead.room, due, reserve))
            if is_next or (has_room and self.may_pass(waiting, lacking)):
                free = self.index.num_free
                if self.restore(self, want):
                    want.is_restoring = True
                    ahead.room_changed()
                    ahead.keep(minus(lacking, minus(free, self.index.num_free)))
                    continue
                for other in waiting:
                    other.num_passed += sum(lacking)
                del self.wants[want.key]
                spare = _for_snapshots(self.index.shape.layout, want)
                if waiting or not self._fits(ahead.room, due, plus(reserve, spare)):
                    spare = self.layout.nothing
                answers.append(_granted(self.index, want, due, spare))
                ahead.room_changed()
            else:
                waiting.append(want)
                ahead.keep(lacking)
        if self.is_short != bool(waiting):
            self.is_short = bool(waiting)
            users = [user.client for user in self.users.values() if not user.is_peer]
            answers += [Answer(client, PoolShortage(self.is_short)) for client in users]
        return answers

    def _in_order(self) -> list[Want]:
        """Return waiting wants in order: decoding clients first, the smallest want first; then priority, age."""

        def place(want: Want) -> tuple[bool, int, int]:
            is_decoding = self.users[want.client].is_decoding
            return not is_decoding, sum(want.num_blocks) if is_decoding else want.priority, want.number

        return sorted((want for want in self.wants.values() if not want.is_restoring), key=place)

    def may_pass(self, waiting: list[Want], wanted: Counts) -> bool:
        """Tell whether a want may pass waiting prompts.

        A prompt is passed by at most half as many blocks as the prompt wants, in all. A decoding client is never
        passed.
        """
        return not any(self.users[want.client].is_decoding for want in waiting) and all(
            want.num_passed + sum(wanted) <= sum(want.num_blocks) // 2 for want in waiting
        )

    def _fits(self, room: Room, due: "Due", more: Counts) -> bool:
        """Tell whether there is room for a want and `more` blocks."""
        return self.index.fits_in(room, plus(due.fresh, more), () if due.prefix is None else due.prefix.found)

    def _reserve_before(self, client: int) -> Counts:
        """Return the number of blocks that a client must leave to decoding."""
        index = self.index
        decoding = [user.client for user in self.users.values() if user.is_decoding]
        is_decoding = bool(index.offers) or any(index.leases.holds(client) for client in decoding)
        if client in decoding or not is_decoding:
            return index.shape.layout.nothing
        return tuple(int(self.reserve * count) for count in index.shape.num_blocks)


class Ahead:
    """Blocks kept for wants that come before others, and the room beside them."""

    def __init__(self, index: BlockIndex) -> None:
        self.index = index
        self.kept: list[Counts] = []
        self._room: Room | None = None

    @property
    def room(self) -> Room:
        """The room of the pool beside the blocks kept."""
        if self._room is None:
            self._room = reduce(Room.without, self.kept, self.index.slabs.room)
        return self._room

    def keep(self, counts: Counts) -> None:
        """Keep blocks for another want."""
        self._room = self.room.without(counts)
        self.kept.append(counts)

    def room_changed(self) -> None:
        """Note that blocks of the pool were leased, freed or evicted."""
        self._room = None


class Due(NamedTuple):
    """Blocks that a want gets."""

    prefix: CachedPrefix | None  # None: the want belongs to no prompt
    fresh: Counts  # free blocks


def _due(index: BlockIndex, want: Want) -> Due:
    """Return the blocks that a want gets now; a prefix that leaves no room for the rest of its prompt is ignored.

    Found blocks of append-only groups take the place of fresh blocks. Blocks of windows and snapshots of states come in
    addition, because the prompt writes blocks of its own behind them.
    """
    prompt, wanted = want.prompt, want.num_blocks
    if prompt is None:
        return Due(None, wanted)
    groups = index.shape.layout.groups
    prefix = index.sealed.find(prompt.keys, resumes=prompt.resumes)
    num_places = max((count for group, count in zip(groups, wanted, strict=True) if group.is_append_only), default=0)
    fresh = list(wanted)
    for number, group in enumerate(groups):
        if group.is_append_only:
            fresh[number] -= len(prefix.found[number])
        elif group.grows and num_places and prompt.resumes:
            fresh[number] = min(fresh[number], num_places - prefix.num_places)
    counts = plus(tuple(map(len, prefix.found)), tuple(fresh))
    if index.slabs.slabs.empty.fits(counts, index.slabs.pins(prefix.found, is_empty=True)):
        return Due(prefix, tuple(fresh))
    return Due(index.sealed.find(b""), wanted)


def _lacking(index: BlockIndex, due: Due) -> Counts:
    """Return the number of free blocks taken by a want; cached blocks of its prompt count as free."""
    if due.prefix is None:
        return due.fresh
    return plus(due.fresh, tuple(map(len, index.sealed.unread(due.prefix.found))))


def _for_snapshots(layout: KVLayout, want: Want) -> Counts:
    """Return the blocks that a want takes for snapshots, if they are free."""
    count = 0 if want.prompt is None else want.prompt.num_snapshots
    return tuple(0 if group.grows else count for group in layout.groups)


def _granted(index: BlockIndex, want: Want, due: Due, spare: Counts) -> Answer:
    """Return the answer to a want, with spare blocks."""
    prefix, fresh = due.prefix, plus(due.fresh, spare)
    if prefix is None:
        leased = index.lease(want.client, fresh)
        return Answer(want.client, BlocksLeased(*packed(leased, index.leases.generation[leased])))
    assert want.prompt is not None, "the prefix is its"
    found = prefix.block_ids
    index.sealed.read(want.client, found)
    block_ids = np.concatenate([found, index.lease(want.client, fresh)])
    return Answer(want.client, prompt_blocks(index, want.prompt, block_ids, prefix))


def prompt_blocks(index: BlockIndex, prompt: PromptWanted, block_ids: np.ndarray, prefix: CachedPrefix) -> PromptBlocks:
    """Return the answer to a prompt: blocks, [num_blocks] intp, with those of the prefix first."""
    blocks, lengths = packed(block_ids, index.leases.generation[block_ids]), (prefix.num_places, prefix.num_alike)
    return PromptBlocks(prompt.request_id, prompt.attempt, *blocks, len(prefix.block_ids), *lengths)


def packed(block_ids: np.ndarray, generations: np.ndarray) -> tuple[bytes, bytes]:
    """Pack ids, [num_blocks] intp, and generations, [num_blocks] int32, for a message."""
    return block_ids.astype(np.int32).tobytes(), generations.tobytes()
