"""Inbox of a decode worker: dispatches messages of the router, of prefill workers and of memory servers."""

from collections.abc import Callable
from typing import Any

from common.base.errors import ErrorCode
from common.grammar.sequence_grammars import SequenceGrammars
from common.serving.prompts.requests import answer
from common.serving.prompts.token_ids import unknown_token
from common.serving.worker.drain import Drain
from common.wire.messages.handoff import DecodeRequest, KVPoolExport, KVProgress
from common.wire.messages.memory import KVOffer, PromptBlocks
from common.wire.messages.operator import Leave
from common.wire.messages.worker import Abort, Inquiry, Message, PeerGone, PrefillRequest
from common.wire.messages.worker_id import is_from
from common.wire.transport.router_link import RouterLink
from common.wire.transport.sockets import Hub
from decode_worker.arrivals.announced import Received
from decode_worker.arrivals.local_prompts import LocalPrompt
from decode_worker.cancellation import Cancellation
from decode_worker.sequences.sequence import DecodeSequence
from decode_worker.sequences.snapshots import Snapshots


class Inbox:
    """Reader of all sockets; never waits."""

    def __init__(
        self,
        link: RouterLink,
        hub: Hub,
        cancellation: Cancellation,
        grammars: SequenceGrammars[DecodeSequence],
        drain: Drain,
        snapshots: Snapshots,
    ) -> None:
        self.snapshots = snapshots
        self.link, self.hub, self.grammars, self.drain = link, hub, grammars, drain
        self.scheduler, self.arrivals, self.report = cancellation.scheduler, cancellation.arrivals, cancellation.report
        self.announced, self.local_prompts = self.arrivals.announced, self.arrivals.local_prompts
        self.pulls, self.offers = self.arrivals.pulls, self.arrivals.offers
        self.router_handlers: dict[type[Message], Callable[[Any], None]] = {
            PrefillRequest: self._accept,
            DecodeRequest: self._accept,
            Abort: lambda message: cancellation.abort(message.request_id, message.attempt),
            Inquiry: self._answer,
            PeerGone: lambda message: self.pulls.early.forget(message.worker_id, message.epoch),
            Leave: lambda message: drain.ask(message.reason),
        }
        self._prefill_handlers: dict[type[Message], Callable[[bytes, Any], None]] = {
            KVPoolExport: self._add_source,
            KVProgress: lambda identity, message: self.pulls.early.progress(message),
        }

    def receive(self) -> None:
        """Handle all arrived messages."""
        for answered in self.offers.shared.receive():
            if isinstance(answered, PromptBlocks):
                self._take_blocks(answered)
            elif isinstance(answered, KVOffer):
                self._add(self.announced.offer(answered, None))
        for server, offered in self.pulls.sources.peers.receive():
            if isinstance(offered, KVOffer):
                self._add(self.announced.offer(offered, server))
        for message in self.link.receive():
            self.link.dispatch(message, self.router_handlers)
        self.announced.decline_unannounced()
        for identity, message in self.hub.receive():
            self._from_prefill(identity, message)

    def _take_blocks(self, granted: PromptBlocks) -> None:
        if self.snapshots.receive(granted):
            return
        is_local = (granted.request_id, granted.attempt) in self.local_prompts.prefixes.grants.asked
        (self.local_prompts.prefixes if is_local else self.pulls.prefixes).receive(granted)

    def _from_prefill(self, identity: bytes, message: Message) -> None:
        handler = self._prefill_handlers.get(type(message))
        if not is_from(identity, message):
            self.hub.refuse(identity, message, "not in the name of the worker whose connection it is")
        elif handler is None:
            self.hub.refuse(identity, message, "a prefill worker does not send it")
        else:
            handler(identity, message)

    def _accept(self, request: PrefillRequest | DecodeRequest) -> None:
        """Compute a prompt here, or expect a prompt computed by a prefill worker."""
        sequence = DecodeSequence.of(request)
        key, scheduler = sequence.key, self.scheduler
        if key in scheduler.active or key in scheduler.reserved or self.arrivals.has(key):
            # Otherwise its blocks would change owners.
            self.link.spoke.refuse(request, f"attempt {request.attempt} of {request.request_id} is here already")
        elif isinstance(request, PrefillRequest) and self.drain.asked:
            self.report(key, ErrorCode.DRAINING, "the decode worker is shutting down")
        elif isinstance(request, DecodeRequest) and self.offers.shared.problem:
            self.report(key, ErrorCode.DRAINING, self.offers.shared.problem)
        elif problem := unknown_token(sequence.token_ids, self.pulls.engine.vocab_size):
            self.report(key, ErrorCode.INTERNAL, problem)
        elif objection := scheduler.capacity.objection(sequence):
            self.report(key, ErrorCode.NEVER_FITS, objection)
        elif isinstance(request, DecodeRequest):
            self._add(self.announced.announce(sequence))
        else:
            self.grammars.begin(sequence)
            self.local_prompts.add(LocalPrompt.of(request, sequence))

    def _add(self, received: Received | None) -> None:
        """Queue a received prompt; does nothing without a prompt."""
        if received is None:
            return
        sequence, offer, server = received
        if problem := unknown_token([offer.token_id], self.pulls.engine.vocab_size):
            (self.offers.shared if server is None else server.peer).decline(offer)
            self.report(sequence.key, ErrorCode.INTERNAL, problem)
        elif server is None:
            self.offers.add(sequence, offer)
        else:
            self.pulls.add(server, sequence, offer)

    def _answer(self, inquiry: Inquiry) -> None:
        """Answer the router, which may ask about many requests at once."""
        keys = {*self.scheduler.active, *self.scheduler.reserved, *(each.key for each in self.arrivals.waiting())}
        self.link.send(answer(inquiry, *self.link.worker, keys.__contains__))

    def _add_source(self, identity: bytes, export: KVPoolExport) -> None:
        sources = self.pulls.sources
        for epoch in sources.epochs(export.worker_id) - {export.epoch}:
            self.pulls.early.forget(export.worker_id, epoch)  # an earlier incarnation
        sources.add(identity, export)
