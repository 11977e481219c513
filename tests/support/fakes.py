"""Workers without a model that speak the real wire: for tests of the router.

A fake runs in a thread of its own. Its "model" makes the next token from the last one and the seed,
so a replay of prompt and outputs continues the same sequence wherever it runs.
"""

import dataclasses
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import zmq

from common.base.errors import ErrorCode
from common.serving.prompts.requests import answer
from common.settings.config import NetSection
from common.wire.messages.handoff import DecodeRequest, KVPathResult, KVPoolExport
from common.wire.messages.memory import KVOffer
from common.wire.messages.token_columns import TokenColumns
from common.wire.messages.worker import (
    Abort,
    DecodePeer,
    FinishReason,
    Heartbeat,
    Inquiry,
    Knock,
    KVPathReport,
    Message,
    PeerGone,
    PrefillRequest,
    PromptLogprobs,
    Refused,
    RequestFailed,
    Reregister,
    Role,
    StillBound,
    Welcome,
    WorkerReady,
)
from common.wire.messages.worker_id import BEAT_SUFFIX, connection_of
from common.wire.transport.endpoints import AUTO, resolved
from common.wire.transport.sockets import Hub, Spoke
from common.wire.values.output_token import Logprobs, OutputToken
from common.wire.values.packing import pack_floats, pack_ids, unpack_ids
from common.wire.values.sampling_params import SamplingParams
from common.wire.values.step_counts import StepMeter
from tests.support.messages import heartbeat, pool_export, worker_ready

POLL_MS = 2
_epochs = itertools.count(1)
_names = itertools.count(1)


def free_endpoint() -> str:
    """A socket in the private directory that nobody else binds; its file goes when it is closed."""
    return resolved(AUTO, f"test-{os.getpid()}-{next(_names)}")


@dataclasses.dataclass(frozen=True)
class FakeModel:
    """What the router compares, and the vocabulary that tokens stay in."""

    name: str
    fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int

    def next_token(self, last: int, sampling: SamplingParams) -> int:
        shift = sampling.seed % 11 if sampling.temperature > 0 else 0
        return (last * 7 + 3 + shift) % self.vocab_size

    def output(self, index: int, last: int, sampling: SamplingParams) -> int:
        """The output at an index, behind the token `last`."""
        return self.next_token(last, sampling)

    def continuation(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> list[int]:
        """All outputs of an undisturbed run."""
        ids = list(prompt_ids)
        for _ in range(sampling.max_tokens):
            ids.append(self.next_token(ids[-1], sampling))
            if ids[-1] in sampling.stop_token_ids:
                break
        return ids[len(prompt_ids) :]


@dataclasses.dataclass
class FakeSequence:
    """One attempt at one request."""

    request_id: str
    attempt: int
    last: int
    num_outputs: int
    sampling: SamplingParams

    def advance(self, model: FakeModel) -> tuple[int, int, FinishReason]:
        """(output index, token id, finish reason) of the next token."""
        index = self.num_outputs
        self.last = model.output(index, self.last, self.sampling)
        self.num_outputs += 1
        finish = FinishReason.NOT_FINISHED
        if self.last in self.sampling.stop_token_ids:
            finish = FinishReason.STOP
        elif self.num_outputs >= self.sampling.max_tokens:
            finish = FinishReason.LENGTH
        return index, self.last, finish


class FakeWorker:
    """The part that is equal for both roles: registration, heartbeats, a thread with a poll loop.

    Flags that a test may set at any time: `mute` (accept work, produce nothing), `silent` (no
    heartbeats either, like a stopped process), `step_age_s` (claim to be stuck for so long).
    """

    role: Role

    def __init__(self, net: NetSection, model: FakeModel, worker_id: str, **ready: Any) -> None:
        self.model = model
        self.worker_id = worker_id
        self.epoch = next(_epochs)
        self.mute = self.silent = False
        self._to_say: deque[Message] = deque()
        self.step_age_s = 0.0
        self.steps = StepMeter()
        self.fail_next: ErrorCode | None = None
        self.lose_next: type[Message] | None = None  # as if it had never arrived
        self.received: list[Message] = []
        self.net = net
        self._ready_fields = ready
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=worker_id, daemon=True)

    @property
    def connection(self) -> bytes:
        return connection_of(self.worker_id, self.epoch)

    def start(self) -> None:
        self._thread.start()

    def kill(self) -> None:
        """End at once, like SIGKILL: nobody is told."""
        self._stop.set()
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()

    def got(self, kind: type[Message]) -> list[Any]:
        """Messages of one kind received so far."""
        return [message for message in list(self.received) if isinstance(message, kind)]

    def say(self, message: Message) -> None:
        """Tell the router, from the worker's own thread."""
        self._to_say.append(message)

    def _ready(self) -> WorkerReady:
        fields: dict[str, Any] = {
            "model_name": self.model.name, "model_fingerprint": self.model.fingerprint,
            "tokenizer_fingerprint": self.model.tokenizer_fingerprint, "num_blocks": (1000,),
            "max_model_len": 1 << 20, "max_batch_tokens": 8192 if self.role is Role.PREFILL else 0,
            "max_num_seqs": 256,
        }  # fmt: skip
        return worker_ready(self.worker_id, self.role, self.epoch, **fields | self._ready_fields)

    def _beat(self) -> Heartbeat:
        return heartbeat(
            self.worker_id, self.epoch, num_running=1, num_free_blocks=(1000,), last_step_age_s=self.step_age_s,
            steps=self.steps.counts(),
        )  # fmt: skip

    def _run(self) -> None:
        self._router = Spoke(self._context, self.net, self.net.router_endpoint, self.connection)
        beat = Spoke(self._context, self.net, self.net.router_endpoint, self.connection + BEAT_SUFFIX)
        try:
            self._open()
            self._router.send(self._ready())
            next_beat_s = 0.0
            while not self._stop.is_set():
                self._router.socket.poll(0 if self._hurries() else POLL_MS)
                if self.silent:
                    continue
                for message in itertools.chain(self._router.receive(), beat.receive()):
                    if self._is_lost(message):
                        continue
                    self.received.append(message)
                    self._handle(message)
                self._work()
                while self._to_say:
                    self._router.send(self._to_say.popleft())
                if time.monotonic() >= next_beat_s:
                    next_beat_s = time.monotonic() + self.net.heartbeat_s
                    beat.send(self._beat())
        finally:
            self._router.close()
            beat.close()
            self._close()
            self._context.destroy(linger=0)

    def _hurries(self) -> bool:
        """Tell whether the next turn waits for no message."""
        return False

    def _handle(self, message: Message) -> None:
        match message:
            case Reregister():
                self._router.send(self._ready())
            case Refused():
                self._stop.set()
            case PrefillRequest():
                if self.fail_next is not None:
                    code, self.fail_next = self.fail_next, None
                    self._router.send(self._failed(message, code))
                elif not self.mute:
                    self._prefill(message)
            case DecodeRequest() | Abort() | PeerGone() | DecodePeer():
                self._note(message)
            case Welcome() | StillBound() | Knock():
                pass
            case Inquiry():
                self._router.send(answer(message, self.worker_id, self.epoch, self._knows))
            case _:
                raise AssertionError(f"{self.worker_id} got {message}")

    def _is_lost(self, message: Message) -> bool:
        is_lost = self.lose_next is not None and isinstance(message, self.lose_next)
        self.lose_next = None if is_lost else self.lose_next
        return is_lost

    def _knows(self, key: tuple[str, int]) -> bool:
        """Whether it was ever told of an attempt, and so has it, for all that a test can tell."""
        requests = [message for message in self.received if isinstance(message, PrefillRequest | KVOffer)]
        return key in {(request.request_id, request.attempt) for request in requests}

    def _failed(self, request: PrefillRequest, code: ErrorCode) -> RequestFailed:
        return RequestFailed(self.worker_id, self.epoch, request.request_id, request.attempt, code, f"fake {code.name}")

    def _send_tokens(self, sequences: Sequence[FakeSequence]) -> list[FakeSequence]:
        """Advance each by one token in one message; returns those that go on."""
        columns, going_on = TokenColumns(), []
        for sequence in sequences:
            index, token_id, finish = sequence.advance(self.model)
            token = OutputToken(token_id, self._logprobs(token_id, sequence.sampling.num_logprobs))
            columns.add(sequence.request_id, sequence.attempt, index, token, finish)
            if finish is FinishReason.NOT_FINISHED:
                going_on.append(sequence)
        self._router.send(columns.batch(self.worker_id, self.epoch))
        return going_on

    def _logprobs(self, token_id: int, num_wanted: int) -> Logprobs | None:
        """The chosen token and its neighbours, ever less likely."""
        if not num_wanted:
            return None
        ids = [(token_id + i) % self.model.vocab_size for i in range(num_wanted - 1)]
        return Logprobs((token_id, *ids), (-0.5, *(-0.5 - i for i in range(len(ids)))))

    def _tell_prompt(self, request: PrefillRequest) -> None:
        """Log-probabilities of the prompt, if they are asked for, in two messages; its tokens have rank 2."""
        ids, num_wanted = unpack_ids(request.token_ids), request.num_prompt_logprobs
        positions = range(max(1, request.first_scored), len(ids) - request.num_outputs) if num_wanted else range(0)
        for part in (positions[:3], positions[3:]):
            told = [self._logprobs(ids[position], num_wanted) for position in part]
            entries = [logprobs for logprobs in told if logprobs is not None]
            if entries:
                self._router.send(
                    PromptLogprobs(
                        worker_id=self.worker_id,
                        epoch=self.epoch,
                        request_id=request.request_id,
                        attempt=request.attempt,
                        first_position=part[0],
                        ranks=pack_ids([2] * len(entries)),
                        num_logprobs=pack_ids(len(each.values) for each in entries),
                        logprob_ids=pack_ids(token_id for each in entries for token_id in each.token_ids),
                        logprobs=pack_floats(value for each in entries for value in each.values),
                    )
                )

    def _sequence(self, request: PrefillRequest | DecodeRequest) -> FakeSequence:
        last = unpack_ids(request.token_ids)[-1]
        return FakeSequence(request.request_id, request.attempt, last, request.num_outputs, request.sampling)

    def _open(self) -> None: ...
    def _close(self) -> None: ...
    def _work(self) -> None: ...
    def _note(self, message: DecodeRequest | Abort | PeerGone | DecodePeer) -> None: ...
    def _prefill(self, request: PrefillRequest) -> None: ...


class FakePrefill(FakeWorker):
    """Makes the first token of a request and hands the rest to a decode worker."""

    role = Role.PREFILL

    def _open(self) -> None:
        self._peers: dict[str, Spoke] = {}

    def _close(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def _note(self, message: DecodeRequest | Abort | PeerGone | DecodePeer) -> None:
        if isinstance(message, DecodePeer):
            if message.worker_id in self._peers:
                self._peers.pop(message.worker_id).close()
            peer = Spoke(self._context, self.net, message.handoff_endpoint, self.connection)
            self._peers[message.worker_id] = peer
            peer.send(pool_export(self.worker_id, self.epoch))

    def _work(self) -> None:
        for peer in self._peers.values():
            self.received.extend(peer.receive())

    def _prefill(self, request: PrefillRequest) -> None:
        sequence = self._sequence(request)
        self._tell_prompt(request)
        if self._send_tokens([sequence]):
            offer = KVOffer(  # to the decode worker itself: there is no memory server between
                request.decode_worker_id,
                request.decode_epoch,
                request_id=request.request_id,
                attempt=request.attempt,
                token_id=sequence.last,
                block_ids=pack_ids([1]),
                generations=pack_ids([1]),
                are_sealed=bytes(1),
                root=b"",
                digest=b"",
            )
            self._peers[request.decode_worker_id].send(offer)


def _is_aborted(sequence: FakeSequence, abort: Abort) -> bool:
    return sequence.request_id == abort.request_id and sequence.attempt <= abort.attempt


class FakeDecode(FakeWorker):
    """Decodes what was handed to it, one TokenBatch a step of `step_s` seconds.

    A test may set at any time how many tokens a text may have for now, `most_outputs`: none ends before it is to.
    If `is_hasty`, steps follow each other without a wait for messages.
    """

    role = Role.DECODE
    step_s = 0.0
    most_outputs = 1 << 30
    is_hasty = False
    path_error = ""

    def _hurries(self) -> bool:
        return self.is_hasty and bool(self.running)

    def _open(self) -> None:
        self._hub = Hub(self._context, self.net, free_endpoint())
        self._ready_fields.setdefault("handoff_endpoint", self._hub.endpoint)
        self.running: list[FakeSequence] = []
        self.announced: dict[tuple[str, int], FakeSequence] = {}
        self.offered: dict[tuple[str, int], int] = {}  # the first token of each
        self._next_step_s = 0.0

    def _close(self) -> None:
        self._hub.close()

    def _note(self, message: DecodeRequest | Abort | PeerGone | DecodePeer) -> None:
        if isinstance(message, DecodeRequest):
            self.announced[message.request_id, message.attempt] = self._sequence(message)
        elif isinstance(message, Abort):
            self.running = [sequence for sequence in self.running if not _is_aborted(sequence, message)]
            self.announced = {key: each for key, each in self.announced.items() if not _is_aborted(each, message)}

    def _work(self) -> None:
        for identity, message in self._hub.receive():
            if self._is_lost(message):
                continue
            self.received.append(message)
            if isinstance(message, KVPoolExport):
                self._hub.send(identity, KVPathResult(self.worker_id, self.epoch, False, self.path_error))
                speed = 0.0 if self.path_error else 100.0
                self._router.send(
                    KVPathReport(
                        worker_id=self.worker_id,
                        epoch=self.epoch,
                        prefill_worker_id=message.worker_id,
                        prefill_epoch=message.epoch,
                        transport="shm",
                        gb_per_s=speed,
                        error=self.path_error,
                    )
                )
            elif isinstance(message, KVOffer):
                self.offered[message.request_id, message.attempt] = message.token_id
        for key in self.announced.keys() & self.offered.keys():
            self.running.append(self.announced.pop(key))
            self.running[-1].last = self.offered.pop(key)
            self.running[-1].num_outputs += 1
        going = [sequence for sequence in self.running if sequence.num_outputs < self.most_outputs]
        if going and not self.mute and time.monotonic() >= self._next_step_s:
            held = [sequence for sequence in self.running if sequence.num_outputs >= self.most_outputs]
            self._next_step_s = time.monotonic() + self.step_s
            self.running = [*held, *self._send_tokens(going)]

    def _prefill(self, request: PrefillRequest) -> None:
        self._tell_prompt(request)
        self.running += self._send_tokens([self._sequence(request)])
