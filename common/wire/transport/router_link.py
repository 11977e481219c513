"""A worker's connection to the router: registration, messages, and a thread with heartbeats.

The heartbeat has its own thread and socket, so a long step does not look like death. The router tells a stuck worker
from a busy worker by the age of the last step in the heartbeat.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import zmq

from common.base.errors import ConfigError, WireError
from common.base.version import VERSION
from common.settings.config import NetSection
from common.wire.messages.frames import decode, encode
from common.wire.messages.worker import (
    Heartbeat,
    Knock,
    Message,
    Refused,
    Reregister,
    StillBound,
    Welcome,
    WorkerGone,
    WorkerLeaving,
    WorkerReady,
)
from common.wire.messages.worker_id import BEAT_SUFFIX, connection_of
from common.wire.transport.endpoints import ROUTER_SOCKET, resolved
from common.wire.transport.sockets import Spoke
from common.wire.values.kv_layout import Counts
from common.wire.values.step_counts import PullMeter, StepMeter

logger = logging.getLogger(__name__)

COMPLAINT_INTERVAL_S = 10.0
ASK_INTERVAL_S = 0.1
"""Seconds between two `WorkerLeaving` of a draining worker."""


@dataclass(slots=True)
class Load:
    """Load of the worker, written by the worker's loop and read by the heartbeat thread."""

    num_free_blocks: Counts
    num_waiting: int = 0
    num_running: int = 0
    num_paused: int = 0
    num_handoffs: int = 0
    last_step_s: float = 0.0  # time.monotonic() of the last finished step, or the start of work
    num_dropped_frames: int = 0
    num_pulled_blocks: int = 0
    num_found_blocks: int = 0
    spared_bytes: int = 0
    num_turns: int = 0
    in_turns: bool = False
    steps: StepMeter = field(default_factory=StepMeter)
    pulls: PullMeter = field(default_factory=PullMeter)
    prompt_block_us: int = 0
    taking_us: int = 0
    short_prompt_s: float = 0.0

    def step_ended(self, launched_s: float, num_tokens: int, num_sequences: int) -> None:
        """Count a finished step. The step began at its launch or at the end of the step before, the later of both."""
        now_s = time.monotonic()
        self.steps.note(now_s - max(launched_s, self.last_step_s), num_tokens, num_sequences)
        self.last_step_s = now_s


class RouterLink:
    """A worker's connection to the router. Construction registers; `receive` yields messages for the worker's loop.

    Raises ConfigError for a registration unreadable to routers.

    Args:
        on_new_router: called after a restart of the router, because all its earlier requests are void.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        net: NetSection,
        ready: WorkerReady,
        on_new_router: Callable[[], None],
    ) -> None:
        _require_readable(ready)
        self.ready = ready
        self.worker = ready.worker_id, ready.epoch
        self.load = Load(ready.num_blocks)
        self.endpoint = resolved(net.router_endpoint, ROUTER_SOCKET)
        self.spoke = Spoke(context, net, self.endpoint, connection_of(*self.worker))
        self.on_new_router = on_new_router
        self.router_epoch: int | None = None
        self.leaving = False
        self.num_bound: int | None = None  # requests bound to the worker, by the last `StillBound`
        self.asked_s = self.answered_s = self.complained_s = time.monotonic()
        self.answer_timeout_s = net.worker_timeout_s
        self.again = threading.Event()
        self.stop = threading.Event()
        self.beat = threading.Thread(target=self._beat, args=(context, net), name="beat", daemon=True)
        self.spoke.send(ready)
        self.beat.start()

    def send(self, message: Message) -> None:
        self.spoke.send(message)

    def receive(self) -> Iterator[Message]:
        """Yield messages from the router, and handle registration; raises ConfigError when the router refuses."""
        if self.router_epoch is None:
            self._complain()
        if self.again.is_set():
            logger.info("the router does not know this worker, registering again")
            self.spoke.send(self.ready)
            self.again.clear()
        for message in self.spoke.receive():
            match message:
                case Welcome():
                    self._welcomed(message.router_epoch)
                case StillBound():
                    self.num_bound, self.answered_s = message.num_requests, time.monotonic()
                case Knock():
                    continue
                case Refused():
                    raise ConfigError(f"the router refused this worker: {message.reason}")
                case _:
                    yield message

    def dispatch(self, message: Message, handlers: Mapping[type[Message], Callable[[Any], None]]) -> None:
        """Hand a message to the handler of its type; a message without a handler is dropped."""
        if (handler := handlers.get(type(message))) is not None:
            handler(message)
        else:
            self.spoke.refuse(message, f"a router does not send it to a {self.ready.role.label} worker")

    def leave(self) -> None:
        """Ask the router to send no new requests and to report the requests still to come."""
        self.leaving, self.answered_s = True, time.monotonic()
        self._ask()

    def is_needed(self) -> bool:
        """Tell whether requests still need a leaving worker; false after `answer_timeout_s` without an answer.

        Repeats the question to the router every `ASK_INTERVAL_S`.
        """
        if not self.leaving or self.num_bound == 0:
            return False
        now_s = time.monotonic()
        if now_s - self.asked_s > ASK_INTERVAL_S:
            self._ask()
        return now_s - self.answered_s < self.answer_timeout_s

    def farewell(self, reason: str) -> None:
        """Send `WorkerGone` and close."""
        self.spoke.send(WorkerGone(*self.worker, reason))
        self.close()

    def close(self) -> None:
        self.stop.set()
        self.beat.join(timeout=2.0)
        self.spoke.close(linger_ms=200)

    def _complain(self) -> None:
        """Warn of a missing answer, because a router with another secret does not even refuse."""
        now_s = time.monotonic()
        if now_s - self.complained_s > COMPLAINT_INTERVAL_S:
            self.complained_s = now_s
            logger.warning(
                "no answer yet from a router at %s; is it running, of this version, %s, with the same net.secret_file?",
                self.endpoint, VERSION,
            )  # fmt: skip

    def _welcomed(self, router_epoch: int) -> None:
        logger.info("registered with the router")
        if self.router_epoch not in (None, router_epoch):
            self.on_new_router()
        self.router_epoch, self.num_bound = router_epoch, None
        if self.leaving:
            self._ask()

    def _ask(self) -> None:
        self.asked_s = time.monotonic()
        self.spoke.send(WorkerLeaving(*self.worker))

    def _beat(self, context: "zmq.Context[zmq.Socket[bytes]]", net: NetSection) -> None:
        identity = connection_of(*self.worker) + BEAT_SUFFIX
        spoke = Spoke(context, net, self.endpoint, identity, keep_last=True)
        while not self.stop.wait(net.heartbeat_s):
            if Reregister in {type(message) for message in spoke.receive()}:
                self.again.set()
            if not self.again.is_set():  # else the router asks again
                spoke.send(self._heartbeat())
        spoke.close()

    def _heartbeat(self) -> Heartbeat:
        load = self.load
        busy = load.num_running > 0
        return Heartbeat(
            worker_id=self.ready.worker_id,
            epoch=self.ready.epoch,
            num_waiting=load.num_waiting,
            num_running=load.num_running,
            num_paused=load.num_paused,
            num_free_blocks=load.num_free_blocks,
            num_handoffs=load.num_handoffs,
            last_step_age_s=max(0.0, time.monotonic() - load.last_step_s) if busy else 0.0,
            num_dropped_frames=load.num_dropped_frames + self.spoke.drops.dropped,
            num_pulled_blocks=load.num_pulled_blocks,
            num_found_blocks=load.num_found_blocks,
            spared_bytes=load.spared_bytes,
            num_turns=load.num_turns,
            in_turns=load.in_turns,
            steps=load.steps.counts(),
            pulls=load.pulls.counts(),
            prompt_block_us=load.prompt_block_us,
            taking_us=load.taking_us,
            short_prompt_us=int(load.short_prompt_s * 1e6),
        )


def _require_readable(ready: WorkerReady) -> None:
    """Raise ConfigError for an unreadable registration, because the router drops such a message without an answer."""
    try:
        decode(encode(ready))
    except WireError as error:
        raise ConfigError(f"this worker cannot register: {error}; see worker.id and model.name") from None
