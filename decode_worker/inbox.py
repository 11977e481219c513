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
from decode_worker.arrivals.arrivals import Arrivals
from decode_worker.arrivals.local_prompt import LocalPrompt
from decode_worker.grammar_masks import SequenceMasks
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sequence import DecodeSequence, Key, is_attempt

logger = logging.getLogger(__name__)


class Inbox:
    """Reader of all sockets; never waits."""

    def __init__(
        self,
        link: RouterLink,
        hub: Hub,
        scheduler: DecodeScheduler,
        arrivals: Arrivals,
        masks: SequenceMasks,
        drain: Drain,
    ) -> None:
        self.worker_id, self.epoch = link.ready.worker_id, link.ready.epoch
        self.link, self.hub, self.scheduler, self.masks, self.drain = link, hub, scheduler, masks, drain
        self.arrivals, self.announced = arrivals, arrivals.announced
        self.pulls, self.offers, self.local_prompts = arrivals.pulls, arrivals.offers, arrivals.local_prompts

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
        self.report()  # first, because an answer may say a request is not here
        for message in self.link.receive():
            self._from_router(message)
        self.announced.tend()
        for identity, message in self.hub.receive():
            self._from_prefill(identity, message)

    def report(self) -> None:
        """Report on prompts not yet decoding; call before sending the first token of any such prompt."""
        for message in self.local_prompts.take_messages():
            self.link.send(message)
        for failure in self.arrivals.take_failures():
            self.fail(*failure)

    def fail(self, key: Key, code: ErrorCode, message: str) -> None:
        """Report a failed attempt to the router; nothing of the attempt is left here."""
        logger.warning("[%s #%d] %s", *key, message)
        self.link.send(RequestFailed(self.worker_id, self.epoch, *key, code, message))

    def give_up(self, sequence: DecodeSequence, code: ErrorCode, message: str) -> None:
        """Fail a sequence that decodes, or whose prompt is computed here."""
        if self.scheduler.active.get(sequence.key) is sequence:
            self.scheduler.end(sequence)
        else:
            self.local_prompts.abort(*sequence.key)
        self.fail(sequence.key, code, message)

    def _from_router(self, message: Message) -> None:
        match message:
            case PrefillRequest():
                self._accept_local(message)
            case DecodeRequest():
                self._announce(message)
            case Abort():
                self._abort(message.request_id, message.attempt)
            case Inquiry():  # may ask about many at once
                waiting = (sequence.key for sequence in self.arrivals.waiting())
                keys = {*self.scheduler.active, *self.scheduler.reserved, *waiting}
                self.link.send(answer(message, self.worker_id, self.epoch, keys.__contains__))
            case PeerGone():
                self.pulls.early.forget(message.worker_id, message.epoch)
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
                for epoch in self.pulls.sources.epochs(message.worker_id) - {message.epoch}:
                    self.pulls.early.forget(message.worker_id, epoch)  # an earlier incarnation
                self.pulls.sources.add(identity, message)
            case KVProgress():
                self.pulls.early.progress(message)
            case _:
                self.hub.refuse(identity, message, "a prefill worker does not send it")

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
            (self.offers.shared if visit is None else visit.peer).decline(offer)
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
            self.masks.begin(sequence)
            scored = message.num_prompt_logprobs, message.first_scored
            self.local_prompts.accept(LocalPrompt(sequence, message.turn, message.most_tokens, *scored), message.salt)

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
        key, scheduler = sequence.key, self.scheduler
        has_begun = key in scheduler.active or key in scheduler.reserved
        if has_begun or key in self.announced or self.arrivals.has(key):  # else its blocks would change owners
            self.link.spoke.refuse(message, f"attempt {message.attempt} of {message.request_id} is here already")
        elif problem := stranger(sequence.token_ids, self.pulls.engine.vocab_size):
            self.fail(key, ErrorCode.INTERNAL, problem)
        elif objection := scheduler.capacity.objection(sequence):
            self.fail(key, ErrorCode.NEVER_FITS, objection)
        else:
            return sequence
        return None

    def _abort(self, request_id: str, attempt: int) -> None:
        self.arrivals.abort(request_id, attempt)
        for key in [key for key in self.scheduler.active if is_attempt(key, request_id, attempt)]:
            self.scheduler.end(self.scheduler.active[key])
