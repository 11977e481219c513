"""Handoffs: offers of complete prompts to decode workers.

offered ──KVReceived──▶ owned by the decode worker
   └──KVDeclined, or the memory server or decode worker lost──▶ owned by the router, for a replay
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from common.base.errors import ErrorCode
from common.memory.client.shared_pool import SharedPool
from common.serving.prompts.requests import Key, fail_request, is_attempt
from common.wire.messages.handoff import KVPathResult, KVPoolExport, KVProgress
from common.wire.messages.memory import KVDeclined, KVReceived
from common.wire.messages.worker import Message, PeerGone
from common.wire.transport.router_link import RouterLink
from common.wire.values.packing import pack_ids
from prefill_worker.reply_pools import ReplyPools
from prefill_worker.sequence import PrefillSequence
from prefill_worker.targets import Target, Targets

logger = logging.getLogger(__name__)


class Handoffs:
    """Owner of each complete request until the decode worker has received the offer."""

    def __init__(self, shared: SharedPool, targets: Targets, reply_pools: ReplyPools, link: RouterLink) -> None:
        self.shared, self.targets, self.reply_pools, self.link = shared, targets, reply_pools, link
        self.worker = link.worker
        self.offered: dict[Key, tuple[str, int]] = {}  # decode worker and epoch, by unanswered offer
        self._handlers: dict[type[Message], Callable[[Any], None]] = {
            KVPathResult: targets.handle_result,
            KVPoolExport: reply_pools.add,
        }

    def offer(self, sequence: PrefillSequence, token_id: int, block_ids: Sequence[int]) -> None:
        """Offer a prompt's blocks and first token to the decode worker; without a KV path, free the blocks and fail."""
        target = self._target(sequence)
        if target is None:
            self.shared.leases.free(block_ids)
            reason = f"decode worker {sequence.request.decode_worker_id} has no KV path from here"
            fail_request(self.link, sequence.key, ErrorCode.HANDOFF_LOST, reason)
            return
        decode_worker = target.worker_id, target.epoch
        chain = sequence.beginning.root, sequence.beginning.last_digest
        if self.shared.offer(decode_worker, sequence.key, token_id, block_ids, chain):
            self.offered[sequence.key] = decode_worker
        else:
            fail_request(self.link, sequence.key, ErrorCode.DRAINING, self.shared.problem)

    def answered(self, answer: KVReceived | KVDeclined) -> None:
        """Forget an offered request after an answer; a void offer is reported to the router."""
        key = answer.request_id, answer.attempt
        decode_worker = self.offered.pop(key, None)
        if decode_worker is not None and isinstance(answer, KVDeclined):
            reason = f"decode worker {decode_worker[0]} did not receive the offer"
            fail_request(self.link, key, ErrorCode.HANDOFF_LOST, reason)

    def abort(self, request_id: str, attempt: int) -> None:
        """Forget every offered attempt up to `attempt`, after the router's abort."""
        for key in [key for key in self.offered if is_attempt(key, request_id, attempt)]:
            del self.offered[key]

    def take_back(self) -> list[Key]:
        """Forget and return all offered requests."""
        keys, self.offered = list(self.offered), {}
        return keys

    def announce(self, sequence: PrefillSequence, block_ids: list[int]) -> None:
        """Tell the decode worker about complete blocks of an unfinished prompt; no blocks: no offer will follow."""
        target = self._target(sequence)
        if target is None or target.is_shared:
            return
        sequence.was_announced = True
        ids, generations = pack_ids(block_ids), self.shared.leases.generations(block_ids).tobytes()
        num_tokens = len(sequence.token_ids)
        target.spoke.send(KVProgress(*self.worker, *sequence.key, num_tokens, ids, generations))

    def free(self, sequence: PrefillSequence, block_ids: Sequence[int]) -> None:
        """Free the blocks of a sequence without a handoff; a pulling decode worker hears that no offer will follow."""
        self.shared.leases.free(block_ids)
        if sequence.was_announced:
            self.announce(sequence, [])

    def receive(self) -> None:
        """Act on messages of decode workers about paths and pools."""
        for target, message in self.targets.receive():
            self.handle(target, message)

    def handle(self, target: Target, message: Message) -> None:
        """Act on a message of a decode worker."""
        if (handler := self._handlers.get(type(message))) is not None:
            handler(message)
        else:
            target.spoke.refuse(message, "a decode worker does not send it")

    def forget(self, gone: PeerGone) -> None:
        """Forget a dead decode worker; the router replays requests offered there."""
        dead = gone.worker_id, gone.epoch
        self.offered = {key: worker for key, worker in self.offered.items() if worker != dead}
        self.targets.leave(gone.worker_id, gone.epoch)
        self.reply_pools.leave(gone.worker_id, gone.epoch)
        logger.info("decode worker %s is gone", gone.worker_id)

    def _target(self, sequence: PrefillSequence) -> Target | None:
        return self.targets.proven(sequence.request.decode_worker_id, sequence.request.decode_epoch)
