"""Messages of clients about blocks of a pool: a handler for each message type.

A handler gets the pool and the client's number, and returns answers to any clients. Handlers raise ProtocolError.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from common.memory.blocks.answers import Answer, ProtocolError
from common.memory.blocks.offers import OfferKey
from common.memory.blocks.pool import Pool, prompt_blocks
from common.wire.messages.memory import (
    BlocksFreed,
    BlocksSealed,
    BlocksWanted,
    KVAccepted,
    KVDeclined,
    KVOffer,
    KVReceived,
    OfBlocks,
    PoolLeft,
    PromptUnwanted,
    PromptWanted,
)
from common.wire.values.fields import KEY_BYTES
from common.wire.values.flags import unpack_flags

Done = BlocksSealed | KVOffer | KVAccepted | KVDeclined
"""Messages of work done, counted in `num_done`; `BlocksWanted` and `BlocksFreed` may come from stuck workers."""


def handle(pool: Pool, client: int, message: OfBlocks) -> list[Answer]:
    """Handle a message of a pool's user."""
    pool.num_done += isinstance(message, Done)
    return _HANDLERS[type(message)](pool, client, message)


def _want_blocks(pool: Pool, client: int, message: BlocksWanted) -> list[Answer]:
    """Grant blocks now or later, in place of the client's earlier want."""
    counts, shape = message.num_blocks, pool.index.shape
    if len(counts) != len(shape.capacity) or not shape.fits(counts):
        raise ProtocolError(f"{counts} blocks of a pool that has {shape.capacity} to give, of one group or another")
    if any(counts):
        pool.want(client, counts)
    else:
        pool.wants.pop((client, "", 0), None)
    return pool.grant()


def _want_prompt(pool: Pool, client: int, message: PromptWanted) -> list[Answer]:
    """Grant all blocks of a prompt now or later; answer a peer with readable blocks."""
    index = pool.index
    if pool.users[client].is_peer:
        prefix = index.sealed.find(message.keys, message.first, resumes=message.resumes)
        if not index.fits(pool.layout.nothing, prefix.found):
            prefix = index.sealed.find(b"")
        index.sealed.read(client, prefix.block_ids)
        return [Answer(client, prompt_blocks(index, message, prefix.block_ids, prefix))]
    num_keys, counts, shape = len(message.keys) // KEY_BYTES, message.num_blocks, index.shape
    groups = shape.layout.groups
    if len(counts) != len(groups) or not shape.fits(counts) or message.first:
        raise ProtocolError(f"{counts} blocks from place {message.first} on, of a pool that has {shape.capacity}")
    if any(group.is_append_only and num_keys > count for group, count in zip(groups, counts, strict=True)):
        raise ProtocolError(f"{counts} blocks for {num_keys} keys")
    pool.want(client, counts, message)
    return pool.grant()


def _unwant_prompt(pool: Pool, client: int, message: PromptUnwanted) -> list[Answer]:
    pool.wants.pop((client, message.request_id, message.attempt), None)
    return pool.grant()


def _seal(pool: Pool, client: int, message: BlocksSealed) -> list[Answer]:
    """Seal blocks written by a client, so other clients find them."""
    pool.index.seal(client, *_blocks(message), message.keys)
    return []


def _free(pool: Pool, client: int, message: BlocksFreed) -> list[Answer]:
    pool.index.free(client, *_blocks(message))
    return pool.grant()


def _offer(pool: Pool, client: int, message: KVOffer) -> list[Answer]:
    """Pass an offer to a decode worker; decline the offer and free its blocks if the worker is unknown."""
    worker = message.decode_worker_id, message.decode_epoch
    takers = (user for user in pool.users.values() if user.is_decoding or user.is_peer)
    target = next((user.client for user in takers if user.worker == worker), None)
    if target is None:
        pool.index.free(client, *_blocks(message))
        return [Answer(client, KVDeclined(message.request_id, message.attempt)), *pool.grant()]
    key = OfferKey(target, message.request_id, message.attempt)
    block_ids, generations = _blocks(message)
    pool.index.offer(client, key, block_ids, generations, unpack_flags(message.are_sealed, len(block_ids)))
    pool.senders[key] = client
    return [Answer(target, message)]


def _receive(pool: Pool, client: int, message: KVReceived) -> list[Answer]:
    key = _key(client, message)
    if key not in pool.index.offers:
        raise ProtocolError(f"attempt {key.attempt} of {key.request_id} is not offered to it")
    return pool.received(key)


def _accept(pool: Pool, client: int, message: KVAccepted) -> list[Answer]:
    """Lease the blocks of an offer to its target, which may have sent no receipt."""
    pool.index.accept(key := _key(client, message))
    return pool.received(key)


def _decline(pool: Pool, client: int, message: KVDeclined) -> list[Answer]:
    """Free the blocks of a declined offer."""
    pool.index.decline(key := _key(client, message))
    return [*pool.undelivered([key]), *pool.grant()]


def _leave(pool: Pool, client: int, message: PoolLeft) -> list[Answer]:
    """Take back all blocks and offers of a client, except blocks its device may still write."""
    pool.index.retain(client, *_blocks(message))
    return [*pool.drop_user(client), *pool.grant()]


def _key(client: int, message: KVReceived | KVAccepted | KVDeclined) -> OfferKey:
    return OfferKey(client, message.request_id, message.attempt)


def _blocks(message: BlocksSealed | BlocksFreed | PoolLeft | KVOffer) -> tuple[np.ndarray, np.ndarray]:
    """Return ids, [num_blocks] intp, and generations, [num_blocks] int32, of a message."""
    return np.frombuffer(message.block_ids, np.int32).astype(np.intp), np.frombuffer(message.generations, np.int32)


_HANDLERS: dict[type[OfBlocks], Callable[[Pool, int, Any], list[Answer]]] = {
    BlocksWanted: _want_blocks,
    BlocksSealed: _seal,
    BlocksFreed: _free,
    PromptWanted: _want_prompt,
    PromptUnwanted: _unwant_prompt,
    KVOffer: _offer,
    KVReceived: _receive,
    KVAccepted: _accept,
    KVDeclined: _decline,
    PoolLeft: _leave,
}
