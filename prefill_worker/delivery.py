"""Complete prompts on their way to decode workers.

──KVOffer──▶ the memory server's, until the decode worker has taken them over, or pulled them into its own pool
"""

import logging
from collections.abc import Callable, Sequence

from common.errors import ErrorCode
from common.memory.shared_pool import SharedPool
from common.serving.inquiry import Key
from common.wire.handoff_messages import KVPathResult, KVPoolExport, KVProgress
from common.wire.messages import Message, PeerGone
from common.wire.packing import pack_ids
from prefill_worker.holders import Holders
from prefill_worker.sequence import PromptSequence
from prefill_worker.targets import Target, Targets

logger = logging.getLogger(__name__)

Fail = Callable[[Key, ErrorCode, str], None]
"""Tells the router that nothing is left of an attempt here."""


class Delivery:
    """Gives blocks away; what is offered needs this worker no more."""

    def __init__(
        self, shared: SharedPool, targets: Targets, holders: Holders, worker: tuple[str, int], fail: Fail
    ) -> None:
        self.shared, self.targets, self.holders, self.fail = shared, targets, holders, fail
        self.worker_id, self.epoch = worker

    def hand_off(self, sequence: PromptSequence, token_id: int, block_ids: Sequence[int]) -> None:
        """Offer a prompt's blocks and its first token to its decode worker."""
        target = self._target(sequence)
        if target is None:
            self.shared.magazine.free(block_ids)
            reason = f"decode worker {sequence.decode_worker_id} has no KV path from here"
            self.fail(sequence.key, ErrorCode.HANDOFF_LOST, reason)
            return
        holder, token_ids = (target.worker_id, target.epoch), sequence.token_ids[:]
        token_ids.append(token_id)
        num_outputs = sequence.num_outputs + 1
        chain, sampling = (sequence.beginning.root, sequence.beginning.last_digest), sequence.sampling
        if not self.shared.offer(holder, sequence.key, token_ids, num_outputs, sampling, block_ids, chain):
            self.fail(sequence.key, ErrorCode.DRAINING, self.shared.problem)

    def announce(self, sequence: PromptSequence, block_ids: list[int]) -> None:
        """Let the decode worker pull these blocks while the prompt goes on; none: nothing will be offered."""
        target = self._target(sequence)
        if target is None or target.is_shared:
            return
        sequence.was_announced = True
        ids, generations = pack_ids(block_ids), self.shared.magazine.generations(block_ids).tobytes()
        num_tokens = len(sequence.token_ids)
        target.spoke.send(KVProgress(self.worker_id, self.epoch, *sequence.key, num_tokens, ids, generations))

    def let_go(self, sequence: PromptSequence, block_ids: Sequence[int]) -> None:
        """Free the blocks of a sequence that is over; who pulls them already is told that nothing will be offered."""
        self.shared.magazine.free(block_ids)
        if sequence.was_announced:
            self.announce(sequence, [])

    def receive(self) -> None:
        """What decode workers say of paths and of their pools."""
        for target, message in self.targets.receive():
            self.heed(target, message)

    def heed(self, target: Target, message: Message) -> None:
        """What a decode worker says, in its own name."""
        match message:
            case KVPathResult():
                self.targets.note_result(message)
            case KVPoolExport():
                self.holders.meet(message)
            case _:
                target.spoke.refuse(message, "a decode worker does not send it")

    def lose(self, gone: PeerGone) -> None:
        """A decode worker is dead."""
        self.targets.leave(gone.worker_id, gone.epoch)
        self.holders.leave(gone.worker_id, gone.epoch)
        logger.info("decode worker %s is gone", gone.worker_id)

    def is_sending(self) -> bool:
        """Whether an offer is not all with the memory server yet."""
        return self.shared.is_sending

    def _target(self, sequence: PromptSequence) -> Target | None:
        return self.targets.proven(sequence.decode_worker_id, sequence.decode_epoch)
