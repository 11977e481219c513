"""Handoffs: offers of complete prompts to decode workers.

offered ──KVReceived──▶ owned by the decode worker
   └──KVDeclined, or the memory server or decode worker lost──▶ owned by the router, for a replay
"""

import logging
from collections.abc import Sequence

from common.base.errors import ErrorCode
from common.memory.client.shared_pool import SharedPool
from common.serving.prompts.inquiry import Key
from common.wire.messages.handoff import KVPathResult, KVPoolExport, KVProgress
from common.wire.messages.memory import KVDeclined, KVReceived
from common.wire.messages.worker import Message, PeerGone, RequestFailed
from common.wire.transport.router_link import RouterLink
from common.wire.values.packing import pack_ids
from prefill_worker.reply_pools import Holders
from prefill_worker.sequence import PromptSequence
from prefill_worker.targets import Target, Targets

logger = logging.getLogger(__name__)


class Delivery:
    """Owner of each complete request until the decode worker has received the offer."""

    def __init__(self, shared: SharedPool, targets: Targets, holders: Holders, link: RouterLink) -> None:
        self.shared, self.targets, self.holders, self.link = shared, targets, holders, link
        self.worker = link.ready.worker_id, link.ready.epoch
        self.offered: dict[Key, tuple[str, int]] = {}  # decode worker and epoch, by unanswered offer

    def hand_off(self, sequence: PromptSequence, token_id: int, block_ids: Sequence[int]) -> None:
        """Offer a prompt's blocks and first token to the decode worker; without a KV path, free the blocks and fail."""
        target = self._target(sequence)
        if target is None:
            self.shared.leases.free(block_ids)
            reason = f"decode worker {sequence.decode_worker_id} has no KV path from here"
            self.fail(sequence.key, ErrorCode.HANDOFF_LOST, reason)
            return
        decode_worker = target.worker_id, target.epoch
        chain = sequence.beginning.root, sequence.beginning.last_digest
        if self.shared.offer(decode_worker, sequence.key, token_id, block_ids, chain):
            self.offered[sequence.key] = decode_worker
        else:
            self.fail(sequence.key, ErrorCode.DRAINING, self.shared.problem)

    def answered(self, answer: KVReceived | KVDeclined) -> None:
        """Forget an offered request after an answer; a void offer is reported to the router."""
        key = answer.request_id, answer.attempt
        decode_worker = self.offered.pop(key, None)
        if decode_worker is not None and isinstance(answer, KVDeclined):
            self.fail(key, ErrorCode.HANDOFF_LOST, f"decode worker {decode_worker[0]} did not receive the offer")

    def abort(self, request_id: str, attempt: int) -> None:
        """Forget every offered attempt up to `attempt`, after the router's abort."""
        for key in [key for key in self.offered if key[0] == request_id and key[1] <= attempt]:
            del self.offered[key]

    def take_back(self) -> list[Key]:
        """Forget and return all offered requests."""
        keys, self.offered = list(self.offered), {}
        return keys

    def announce(self, sequence: PromptSequence, block_ids: list[int]) -> None:
        """Tell the decode worker about complete blocks of an unfinished prompt; no blocks: no offer will follow."""
        target = self._target(sequence)
        if target is None or target.is_shared:
            return
        sequence.was_announced = True
        ids, generations = pack_ids(block_ids), self.shared.leases.generations(block_ids).tobytes()
        num_tokens = len(sequence.token_ids)
        target.spoke.send(KVProgress(*self.worker, *sequence.key, num_tokens, ids, generations))

    def let_go(self, sequence: PromptSequence, block_ids: Sequence[int]) -> None:
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
        match message:
            case KVPathResult():
                self.targets.handle_result(message)
            case KVPoolExport():
                self.holders.add(message)
            case _:
                target.spoke.refuse(message, "a decode worker does not send it")

    def lose(self, gone: PeerGone) -> None:
        """Forget a dead decode worker; the router replays requests offered there."""
        dead = gone.worker_id, gone.epoch
        self.offered = {key: worker for key, worker in self.offered.items() if worker != dead}
        self.targets.leave(gone.worker_id, gone.epoch)
        self.holders.leave(gone.worker_id, gone.epoch)
        logger.info("decode worker %s is gone", gone.worker_id)

    def fail(self, key: Key, code: ErrorCode, message: str) -> None:
        """Report a failed attempt to the router; nothing of the attempt is left here."""
        logger.warning("[%s #%d] %s", *key, message)
        self.link.send(RequestFailed(*self.worker, *key, code, message))

    def _target(self, sequence: PromptSequence) -> Target | None:
        return self.targets.proven(sequence.decode_worker_id, sequence.decode_epoch)
