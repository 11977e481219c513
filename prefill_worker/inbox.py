"""Inbox of a prefill worker: dispatches messages of the router, decode workers and the memory server."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from common.base.errors import ErrorCode
from common.device.engine.engine import Engine
from common.grammar.sequence_grammars import SequenceGrammars
from common.serving.prompts.requests import Key, answer, fail_request
from common.serving.prompts.scheduler import PromptScheduler
from common.serving.prompts.token_ids import unknown_token
from common.serving.worker.drain import Drain
from common.wire.messages.memory import KVDeclined, KVOffer, KVReceived, PromptBlocks
from common.wire.messages.operator import Leave
from common.wire.messages.worker import Abort, DecodePeer, Inquiry, Message, PeerGone, PrefillRequest
from common.wire.transport.router_link import RouterLink
from prefill_worker.handoffs import Handoffs
from prefill_worker.sequence import PrefillSequence

logger = logging.getLogger(__name__)


class Inbox:
    """Reader of all sockets; never waits."""

    def __init__(
        self,
        link: RouterLink,
        engine: Engine,
        scheduler: PromptScheduler[PrefillSequence],
        handoffs: Handoffs,
        grammars: SequenceGrammars[PrefillSequence],
        drain: Drain,
    ) -> None:
        self.link, self.engine, self.drain = link, engine, drain
        self.scheduler, self.handoffs, self.grammars = scheduler, handoffs, grammars
        self.fail = partial(fail_request, link)
        self.router_handlers: dict[type[Message], Callable[[Any], None]] = {
            PrefillRequest: self._accept,
            Abort: self._abort,
            Inquiry: lambda message: link.send(answer(message, *handoffs.worker, self._has)),
            DecodePeer: handoffs.targets.join,
            PeerGone: handoffs.forget,
            Leave: lambda message: drain.ask(message.reason),
        }
        self._memory_handlers: dict[type[Message], Callable[[Any], None]] = {
            PromptBlocks: scheduler.prefixes.receive,
            KVReceived: handoffs.answered,
            KVDeclined: handoffs.answered,
            KVOffer: lambda offer: logger.error(
                "[%s #%d] is offered to a prefill worker", offer.request_id, offer.attempt
            ),
        }

    def receive(self) -> None:
        """Handle all arrived messages."""
        for message in self.link.receive():
            self.link.dispatch(message, self.router_handlers)
        self.handoffs.receive()
        for answered in self.engine.shared.receive():
            self._memory_handlers[type(answered)](answered)

    def owns_something(self) -> bool:
        """Tell whether any request is here."""
        return bool(self.scheduler.prompts or self.handoffs.offered)

    def give_everything_back(self, reason: str = "the prefill worker is shutting down") -> None:
        """Fail every request here, so the router replays the requests elsewhere."""
        for key in [*self.handoffs.take_back(), *self.scheduler.prompts]:
            self.fail(key, ErrorCode.DRAINING, reason)
            self.scheduler.remove(*key)

    def forget_everything(self) -> None:
        """Drop every request after a restart of the router, because no client waits any more."""
        self.handoffs.take_back()
        for key in list(self.scheduler.prompts):
            self.scheduler.remove(*key)

    def _accept(self, request: PrefillRequest) -> None:
        sequence = PrefillSequence.of(request)
        if self._has(sequence.key):
            self.link.spoke.refuse(request, f"attempt {request.attempt} of {request.request_id} is here already")
        elif self.drain.asked:
            self.fail(sequence.key, ErrorCode.DRAINING, "the prefill worker is shutting down")
        elif problem := unknown_token(sequence.token_ids, self.engine.vocab_size):
            self.fail(sequence.key, ErrorCode.INTERNAL, problem)
        elif objection := self.scheduler.objection(sequence):
            self.fail(sequence.key, ErrorCode.NEVER_FITS, objection)
        else:
            self.grammars.begin(sequence)
            self.scheduler.add(sequence)

    def _abort(self, message: Abort) -> None:
        self.scheduler.remove(message.request_id, message.attempt)
        self.handoffs.abort(message.request_id, message.attempt)

    def _has(self, key: Key) -> bool:
        return key in self.scheduler.prompts or key in self.handoffs.offered
