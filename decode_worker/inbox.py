"""Inbox of a decode worker: dispatches messages of the router and of prefill workers, and reports failures."""

import logging

from common.base.errors import ErrorCode
from common.serving.prompts.inquiry import answer
from common.serving.prompts.token_ids import stranger
from common.serving.worker.drain import Drain
from common.wire.messages.handoff import DecodeRequest, KVPoolExport, KVProgress
from common.wire.messages.memory import KVOffer, PromptBlocks
from common.wire.messages.operator import Leave
from common.wire.messages.worker import Abort, Inquiry, Message, PeerGone, PrefillRequest, RequestFailed
from common.wire.messages.worker_id import is_from
from common.wire.transport.router_link import RouterLink
from common.wire.transport.sockets import Hub
from common.wire.values.packing import unpack_array
from decode_worker.arrivals.announced import Received
from decode_worker.arrivals.local_prompts import LocalPrompts
from decode_worker.arrivals.offers import Offers
from decode_worker.arrivals.pulls import Pulls
from decode_worker.grammar_masks import Guides
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sequence import DecodeSequence, Key, is_attempt

logger = logging.getLogger(__name__)


class Inbox:
    """Reader of both sockets; never waits."""

    def __init__(
        self,
        link: RouterLink,
        hub: Hub,
        scheduler: DecodeScheduler,
        pulls: Pulls,
        offers: Offers,
        local_prompts: LocalPrompts,
        guides: Guides,
        drain: Drain,
    ) -> None:
        self.worker_id, self.epoch = link.ready.worker_id, link.ready.epoch
        self.link, self.hub, self.drain = link, hub, drain
        self.scheduler, self.pulls, self.offers, self.announced = scheduler, pulls, offers, pulls.announced
        self.local_prompts, self.guides = local_prompts, guides

    def receive(self) -> None:
        """Handle all arrived messages."""
        for said in self.offers.shared.receive():
            match said:
                case PromptBlocks() if self.local_prompts.prefixes.has_asked(said):
                    self.local_prompts.prefixes.hear(said)
                case PromptBlocks():
                    self.pulls.prefixes.hear(said)
                case KVOffer():
                    self._take(self.announced.offer(said, None))
        for visit, offered in self.pulls.sources.visits.receive():
            if isinstance(offered, KVOffer):
                self._take(self.announced.offer(offered, visit))
        self.tell()  # first, because an answer may say a request is not here
        for message in self.link.receive():
            self._from_router(message)
        self.announced.tend()
        for identity, message in self.hub.receive():
            self._from_prefill(identity, message)

    def tell(self) -> None:
        """Report on prompts not yet decoding; call before sending the first token of any such prompt."""
        for message in self.local_prompts.take_messages():
            self.link.send(message)
        for failure in [*self.offers.take_failures(), *self.pulls.take_failures()]:
            self.fail(*failure)

    def fail(self, key: Key, code: ErrorCode, message: str) -> None:
        """Report a failed attempt to the router; nothing of the attempt is left here."""
        logger.warning("[%s #%d] %s", *key, message)
        self.link.send(RequestFailed(self.worker_id, self.epoch, *key, code, message))

    def give_back_prompts(self, problem: str) -> None:
        """Return prompts that wait for blocks or offers to the router, because no more of either come."""
        waiting = [sequence.key for sequence in self.local_prompts.waiting]
        for key in waiting:
            self.local_prompts.abort(*key)
        for key in [*waiting, *self.announced.take_back()]:
            self.fail(key, ErrorCode.DRAINING, problem)

    def _from_router(self, message: Message) -> None:
        match message:
            case PrefillRequest():
                self._accept_local(message)
            case DecodeRequest():
                self._announce(message)
            case Abort():
                self._abort(message.request_id, message.attempt)
            case Inquiry():
                self.link.send(answer(message, self.worker_id, self.epoch, self._keys().__contains__))
            case PeerGone():
                self.pulls.forget(message.worker_id, message.epoch)
            case Leave():
                self.drain.ask(message.reason)
            case _:
                self.link.spoke.refuse(message, "a router does not send it to a decode worker")

    def _from_prefill(self, identity: bytes, message: Message) -> None:
        if not is_from(identity, message):
            self.hub.refuse(identity, message, "not in the name of the worker whose connection it is")
            return
        match message:
            case KVPoolExport():
                self._meet(identity, message)
            case KVProgress():
                self.pulls.progress(message)
            case _:
                self.hub.refuse(identity, message, "a prefill worker does not send it")

    def _meet(self, identity: bytes, export: KVPoolExport) -> None:
        """Start a proof of a prefill worker's pool; forget earlier incarnations of the worker."""
        for epoch in self.pulls.sources.epochs(export.worker_id) - {export.epoch}:
            self.pulls.forget(export.worker_id, epoch)
        self.pulls.sources.meet(identity, export)

    def _announce(self, message: DecodeRequest) -> None:
        """Expect a prompt computed by a prefill worker."""
        if problem := self.offers.shared.problem:
            self.fail((message.request_id, message.attempt), ErrorCode.DRAINING, problem)
        elif (sequence := self._admitted(message)) is not None:
            self._take(self.announced.announce(sequence))

    def _take(self, received: Received | None) -> None:
        """Queue a received prompt; does nothing without a prompt."""
        if received is None:
            return
        sequence, offer, visit = received
        if problem := stranger([offer.token_id], self.pulls.engine.vocab_size):
            (self.offers.shared if visit is None else visit.guest).decline(offer)
            self.fail(sequence.key, ErrorCode.INTERNAL, problem)
        elif visit is None:
            self.offers.add(sequence, offer)
        else:
            self.pulls.add(visit, sequence, offer)

    def _accept_local(self, message: PrefillRequest) -> None:
        """Queue a prompt to compute here."""
        if self.drain.asked:
            key = message.request_id, message.attempt
            self.fail(key, ErrorCode.DRAINING, "the decode worker is shutting down")
        elif (sequence := self._admitted(message)) is not None:
            sequence.num_prompt_logprobs, sequence.first_scored = message.num_prompt_logprobs, message.first_scored
            self.guides.begin(sequence)
            self.local_prompts.accept(sequence, message.turn, message.salt, message.most_tokens)

    def _admitted(self, message: PrefillRequest | DecodeRequest) -> DecodeSequence | None:
        """Return the sequence of a request; None, with a report to the router, if decoding here is impossible."""
        sequence = DecodeSequence(
            request_id=message.request_id,
            attempt=message.attempt,
            token_ids=unpack_array(message.token_ids),
            num_outputs=message.num_outputs,
            sampling=message.sampling,
            priority=message.priority,
            client=message.client,
        )
        if self._has(sequence.key) or sequence.key in self.announced:
            self.link.spoke.refuse(message, f"attempt {message.attempt} of {message.request_id} is here already")
        elif problem := stranger(sequence.token_ids, self.pulls.engine.vocab_size):
            self.fail(sequence.key, ErrorCode.INTERNAL, problem)
        elif objection := self.scheduler.capacity.objection(sequence):
            self.fail(sequence.key, ErrorCode.NEVER_FITS, objection)
        else:
            return sequence
        return None

    def _abort(self, request_id: str, attempt: int) -> None:
        self.announced.abort(request_id, attempt)
        self.pulls.abort(request_id, attempt)
        self.offers.abort(request_id, attempt)
        self.local_prompts.abort(request_id, attempt)
        for key in [key for key in self.scheduler.active if is_attempt(key, request_id, attempt)]:
            self.scheduler.end(self.scheduler.active[key])

    def _keys(self) -> set[Key]:
        """Return all attempts being served, as a set because the router may ask about many at once."""
        waiting = [handoff.sequence for handoff in self.pulls.waiting] + self.local_prompts.waiting
        waiting += [each.sequence for each in self.offers.waiting]
        return {*self.scheduler.active, *self.scheduler.reserved, *(sequence.key for sequence in waiting)}

    def _has(self, key: Key) -> bool:
        """Tell whether an attempt is being served; a duplicate would replace the owner of the attempt's blocks."""
        owners = self.pulls.waiting, self.offers.waiting, self.scheduler.active, self.scheduler.reserved
        return any(key in owner for owner in owners) or self.local_prompts.has(key)
