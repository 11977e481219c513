"""Complete prompts on their way to decode workers.

in a shared pool    ──KVOffer──▶ the memory server's, until the decode worker takes them over
from pool to pool   ──KVProgress, KVHandoff──▶ kept here until pulled (see `handoff_table`)
"""

import logging
import time
from collections.abc import Callable

from common.device.engine import Engine
from common.errors import ErrorCode
from common.serving.inquiry import asked, missing, question
from common.wire.handoff_messages import KVHandoff, KVLease, KVPathResult, KVProgress, KVRelease
from common.wire.memory_messages import KVDeclined
from common.wire.messages import Inquiry, InquiryReply, Message, PeerGone
from common.wire.packing import pack_ids, unpack_ids
from prefill_worker.handoff_table import HandoffTable
from prefill_worker.sequence import Key, PromptSequence
from prefill_worker.targets import Target, Targets

logger = logging.getLogger(__name__)

Fail = Callable[[Key, ErrorCode, str], None]
"""Tells the router that nothing is left of an attempt here."""


class Delivery:
    """Owner of blocks between "prompt computed" and "the decode worker's or free"."""

    def __init__(
        self, engine: Engine, targets: Targets, handoffs: HandoffTable, worker_id: str, epoch: int, fail: Fail
    ) -> None:
        self.engine, self.targets, self.handoffs, self.fail = engine, targets, handoffs, fail
        self.worker_id, self.epoch = worker_id, epoch

    def hand_off(self, sequence: PromptSequence, token_id: int, block_ids: list[int]) -> None:
        """Give a prompt's blocks and its first token to its decode worker."""
        target = self.targets.proven(sequence.decode_worker_id, sequence.decode_epoch)
        if target is None:
            self.engine.allocator.free(block_ids)
            reason = f"decode worker {sequence.decode_worker_id} cannot pull from here"
            self.fail(sequence.key, ErrorCode.HANDOFF_LOST, reason)
        elif target.is_shared:
            self._offer(target, sequence, token_id, block_ids)
        else:
            self._keep(target, sequence, token_id, block_ids)

    def announce(self, sequence: PromptSequence, block_ids: list[int]) -> None:
        """Let the decode worker pull these blocks while the prompt goes on; none: there will be no handoff."""
        target = self.targets.proven(sequence.decode_worker_id, sequence.decode_epoch)
        if target is None or target.is_shared:
            return
        sequence.was_announced = True
        request_id, attempt = sequence.key
        ids, num_tokens = pack_ids(block_ids), len(sequence.token_ids)
        target.spoke.send(KVProgress(self.worker_id, self.epoch, request_id, attempt, num_tokens, ids))

    def let_go(self, sequence: PromptSequence, block_ids: list[int]) -> None:
        """Free the blocks of a sequence that is over; who pulls them already is told that no handoff will come."""
        self.engine.allocator.free(block_ids)
        if sequence.was_announced:
            self.announce(sequence, [])

    def receive(self) -> None:
        """What decode workers and the memory server say of prompts handed over."""
        for target, message in self.targets.receive():
            self.heed(target, message)
        for declined in self.engine.shared.receive() if self.engine.shared is not None else ():
            if isinstance(declined, KVDeclined):
                key = (declined.request_id, declined.attempt)
                self.fail(key, ErrorCode.HANDOFF_LOST, "its decode worker is gone")

    def heed(self, target: Target, message: Message) -> None:
        """What a decode worker says, in its own name."""
        match message:
            case KVPathResult():
                self.targets.note_result(message)
            case KVLease():
                keys = zip(message.request_ids, unpack_ids(message.attempts), strict=False)
                held = self.handoffs.renew(message.worker_id, message.epoch, keys, time.monotonic())
                ids, attempts = [key[0] for key in held], [key[1] for key in held]
                target.spoke.send(KVLease(self.worker_id, self.epoch, tuple(ids), pack_ids(attempts)))
            case KVRelease():
                self.handoffs.release(message.worker_id, message.epoch, (message.request_id, message.attempt))
            case InquiryReply():
                self._give_up(missing(message), target)
            case _:
                target.spoke.refuse(message, "a decode worker does not send it")

    def lose(self, gone: PeerGone) -> None:
        """A decode worker is dead: free what was kept for it."""
        self.targets.leave(gone.worker_id, gone.epoch)
        freed = self.handoffs.drop_target(gone.worker_id, gone.epoch)
        log = logger.warning if freed else logger.info
        log("decode worker %s is gone, freed %d handoffs", gone.worker_id, len(freed))

    def ask_on(self, inquiry: Inquiry) -> None:
        """Ask decode workers whether they have what is kept for them: they may wait for room, or never have heard."""
        for (worker_id, epoch), keys in self.handoffs.by_holder(asked(inquiry)).items():
            if (target := self.targets.proven(worker_id, epoch)) is not None:
                target.spoke.send(question(keys))

    def is_sending(self) -> bool:
        """Whether an offer is not all with the memory server yet."""
        return self.engine.shared is not None and self.engine.shared.is_sending

    def sweep(self) -> None:
        """Free what nobody claimed in time; the handoff or its release may be lost, and the router knows which."""
        for key in self.handoffs.expire(time.monotonic()):
            self.fail(key, ErrorCode.HANDOFF_LOST, "nobody claimed its blocks within the lease (prefill.lease_s)")

    def _offer(self, target: Target, sequence: PromptSequence, token_id: int, block_ids: list[int]) -> None:
        shared, holder = self.engine.shared, (target.worker_id, target.epoch)
        assert shared is not None, "a decode worker shares no pool of ours alone"
        token_ids, num_outputs = sequence.token_ids[:], sequence.num_outputs + 1
        token_ids.append(token_id)
        if not shared.offer(holder, sequence.key, token_ids, num_outputs, sequence.sampling, block_ids):
            self.fail(sequence.key, ErrorCode.DRAINING, shared.problem)

    def _keep(self, target: Target, sequence: PromptSequence, token_id: int, block_ids: list[int]) -> None:
        self.handoffs.keep(sequence.key, target.worker_id, target.epoch, block_ids, time.monotonic())
        target.spoke.send(
            KVHandoff(
                worker_id=self.worker_id,
                epoch=self.epoch,
                request_id=sequence.request_id,
                attempt=sequence.attempt,
                token_ids=pack_ids([*sequence.token_ids, token_id]),
                num_outputs=sequence.num_outputs + 1,
                sampling=sequence.sampling,
                block_ids=pack_ids(block_ids),
                lease_s=self.handoffs.lease_s,
            )
        )

    def _give_up(self, keys: list[Key], target: Target) -> None:
        """A decode worker does not have these; what it had and let go of it has released before it said so."""
        for key in keys:
            if self.handoffs.release(target.worker_id, target.epoch, key):
                self.fail(key, ErrorCode.HANDOFF_LOST, f"its handoff never reached decode worker {target.worker_id}")
