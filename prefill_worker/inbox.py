"""Inbox of a prefill worker: dispatches messages of the router, decode workers and the memory server."""

import logging

from common.base.errors import ErrorCode
from common.device.engine.engine import Engine
from common.memory.client.shared_pool import PromptMessage
from common.serving.prompts.inquiry import Key, answer
from common.serving.prompts.token_ids import stranger
from common.serving.worker.drain import Drain
from common.wire.messages.memory import KVDeclined, KVOffer, KVReceived, PromptBlocks
from common.wire.messages.operator import Leave
from common.wire.messages.worker import Abort, DecodePeer, Inquiry, Message, PeerGone, PrefillRequest
from common.wire.transport.router_link import RouterLink
from prefill_worker.grammar_masks import PromptMasks
from prefill_worker.handoffs import Delivery
from prefill_worker.scheduler import PromptScheduler
from prefill_worker.sequence import PromptSequence

logger = logging.getLogger(__name__)


class Inbox:
    """Reader of all sockets; never waits."""

    def __init__(
        self,
        link: RouterLink,
        engine: Engine,
        scheduler: PromptScheduler,
        delivery: Delivery,
        masks: PromptMasks,
        drain: Drain,
    ) -> None:
        self.link, self.engine, self.drain = link, engine, drain
        self.scheduler, self.delivery, self.masks = scheduler, delivery, masks

    def receive(self) -> None:
        """Handle all arrived messages."""
        for message in self.link.receive():
            self._from_router(message)
        self.delivery.receive()
        for said in self.engine.shared.receive():
            self._from_memory(said)

    def owns_something(self) -> bool:
        """Tell whether any request is here."""
        return bool(self.scheduler.sequences() or self.delivery.offered)

    def give_everything_back(self, reason: str = "the prefill worker is shutting down") -> None:
        """Fail every request here, so the router replays the requests elsewhere."""
        keys = [*self.delivery.take_back(), *(sequence.key for sequence in self.scheduler.sequences())]
        for key in keys:
            self.delivery.fail(key, ErrorCode.DRAINING, reason)
            self.scheduler.remove(*key)

    def forget_everything(self) -> None:
        """Drop every request after a restart of the router, because no client waits any more."""
        self.delivery.take_back()
        for sequence in self.scheduler.sequences():
            self.scheduler.remove(*sequence.key)

    def _from_router(self, message: Message) -> None:
        match message:
            case PrefillRequest():
                self._accept(message)
            case Abort():
                self.scheduler.remove(message.request_id, message.attempt)
                self.delivery.abort(message.request_id, message.attempt)
            case Inquiry():
                self.link.send(answer(message, *self.delivery.worker, self._has))
            case DecodePeer():
                self.delivery.targets.join(message)
            case PeerGone():
                self.delivery.lose(message)
            case Leave():
                self.drain.ask(message.reason)
            case _:
                self.link.spoke.refuse(message, "a router does not send it to a prefill worker")

    def _from_memory(self, said: PromptMessage) -> None:
        match said:
            case PromptBlocks():
                self.scheduler.prefixes.hear(said)
            case KVReceived() | KVDeclined():
                self.delivery.answered(said)
            case KVOffer():
                logger.error("[%s #%d] is offered to a prefill worker", said.request_id, said.attempt)

    def _accept(self, request: PrefillRequest) -> None:
        sequence = PromptSequence.of(request)
        if self._has(sequence.key):
            self.link.spoke.refuse(request, f"attempt {request.attempt} of {request.request_id} is here already")
        elif self.drain.asked:
            self.delivery.fail(sequence.key, ErrorCode.DRAINING, "the prefill worker is shutting down")
        elif problem := stranger(sequence.token_ids, self.engine.vocab_size):
            self.delivery.fail(sequence.key, ErrorCode.INTERNAL, problem)
        elif objection := self.scheduler.objection(sequence):
            self.delivery.fail(sequence.key, ErrorCode.NEVER_FITS, objection)
        else:
            self.masks.begin(sequence)
            self.scheduler.prefixes.begin(sequence, request.salt)
            self.scheduler.add(sequence)

    def _has(self, key: Key) -> bool:
        return self.scheduler.has(key) or key in self.delivery.offered
