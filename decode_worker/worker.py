"""The decode worker's loop: receive, admit, launch the next step, collect the last, emit, beat.

The next step is launched before the last step's tokens are read, because tokens and positions advance on the device.
The host works in the shadow of the step. So a sequence ended by a stop token runs a step too many; the extra token is
dropped. The launch waits until shortly before the running step ends (see `pace`), so that arriving handoffs join early.

Life of a request here:
    1. `DecodeRequest` announces the request, which waits for the `KVOffer` of its prompt (see `announced`). The offer
       waits for a row and blocks. Blocks in the own pool change owner (see `offers`); blocks of another pool are pulled
       (see `pulls`). A prompt of a `PrefillRequest` waits, too, and is computed here (see `local_prompts`).
    2. The sequence enters a row and gets a token each step. A stop token, max_tokens, `Abort` or preemption ends the
       sequence.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from common.base.errors import ErrorCode
from common.device.engine.engine import Engine
from common.device.steps.loop_trace import WAIT
from common.device.steps.output_ring import LOOK_INTERVAL_S, PendingOutput
from common.device.steps.prompt_runner import PromptRunner
from common.grammar.followers import Followers
from common.kernels.base.sampling_operands import NO_CHOICE
from common.serving.worker.drain import Drain
from common.serving.worker.idling import Idling
from common.serving.worker.peer_servers import Visits
from common.settings.config import Config
from common.wire.messages.worker import WorkerReady
from common.wire.transport.router_link import RouterLink
from common.wire.transport.sockets import Hub
from decode_worker.admission import Admission
from decode_worker.arrivals.announced import Announced
from decode_worker.arrivals.arrivals import Arrivals
from decode_worker.arrivals.local_prompts import LocalPrompts
from decode_worker.arrivals.offers import Offers
from decode_worker.arrivals.pulls import Pulls
from decode_worker.arrivals.sources import Sources
from decode_worker.batch.pace import Pace
from decode_worker.batch.prefix_sharing import PrefixSharing
from decode_worker.batch.runner import DecodeRunner
from decode_worker.grammar_masks import SequenceMasks
from decode_worker.inbox import Inbox
from decode_worker.outputs import Outputs
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sealing import Sealing
from decode_worker.sequences.sequence import DecodeSequence

IDLE_POLL_MS, QUIET_POLLS = 50, 10
"""Milliseconds of a poll, and polls without a message before spare time is used."""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A launched step and the sequences of its rows."""

    pending: PendingOutput
    sequences: list[DecodeSequence]
    guided: list[DecodeSequence]  # sequences under a grammar
    unsure: list[DecodeSequence]  # guided sequences whose mask may come too late
    launched_s: float


class DecodeWorker:
    """Owner of the scheduler, the batch and the sockets; `run` returns when drained."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        *,
        runner: DecodeRunner,
        prompt_runner: PromptRunner,
        hub: Hub,
        ready: WorkerReady,
        drain: Drain,
        followers: Followers[DecodeSequence],
    ) -> None:
        worker = ready.worker_id, ready.epoch
        self.engine, self.batch, self.runner, self.hub, self.drain = engine, runner.batch, runner, hub, drain
        chunk_tokens = config.decode.local_chunk_tokens
        self.scheduler = DecodeScheduler(engine.allocator, ready.max_num_seqs, engine.max_len, chunk_tokens)
        self.poller, announced = zmq.Poller(), Announced(engine.shared)
        self.sources = Sources(engine, Visits(engine, worker, self.poller), hub)
        self.pulls = Pulls(engine, self.scheduler, config, self.sources, announced)
        self.sealing = Sealing(engine.shared.leases)
        self.offers = Offers(engine.shared, self.scheduler, self.sealing)
        self.local_prompts = LocalPrompts(prompt_runner, self.scheduler, engine.shared.leases, config, worker)
        self.arrivals = Arrivals(announced, self.pulls, self.offers, self.local_prompts)
        self.admission = Admission(self.scheduler, self.offers, self.pulls, self.local_prompts)
        self.masks, self.trace = SequenceMasks(followers, self.batch.grammars), runner.trace
        self.sharing = PrefixSharing(self.scheduler.layout.groups[0])
        self.in_flight: DecodeStep | None = None
        self.pace = Pace()
        self.link = RouterLink(zmq.Context.instance(), config.net, ready, self.forget_everything)
        self.inbox = Inbox(self.link, hub, self.scheduler, self.arrivals, self.masks, drain)
        self.outputs = Outputs(self.link, self.scheduler, self.sealing, self.masks, self.inbox.give_up)
        for source in (self.link.spoke.socket, hub.socket, engine.shared):
            self.poller.register(source, zmq.POLLIN)
        self.idling = Idling(self.poller, on_gpu=engine.device.type == "cuda")

    def run(self) -> None:
        """Work until drained."""
        while not self.drain.finished(self._owns_something() or self.link.is_needed()):
            if self.drain.begins():
                self.link.leave()
            self._await_work()
            with self.trace.turn():
                self.turn()
        self.give_everything_back()
        self.link.farewell(self.drain.reason)
        self.engine.leave()
        self.close()

    def turn(self) -> None:
        """Receive, launch the next step, collect the last, emit; each part is a method below, in this order."""
        with self.trace.phase("receive"):
            self.inbox.receive()
            self.admit()
            self.outputs.handle_answers()
        self.step()
        with self.trace.phase("emit"):
            self.outputs.flush()
            self.tend()
            self.beat()
        with self.trace.phase("local prompt"):
            self.launch_prompt()

    def admit(self) -> None:
        """Move handoffs along; never waits for a copy."""
        self._enter([*self.admission.fill_rows(), *self.pulls.finish()])
        self.pulls.tend()
        self.inbox.report()
        for report in self.sources.tend():
            self.link.send(report)

    def step(self) -> None:
        """Launch the next step shortly before the running step ends, then collect the running step."""
        if self.in_flight is not None:
            with self.trace.phase(WAIT):
                self._tend(self.in_flight.pending, self.pace.should_wait)  # handoffs join the next step meanwhile
        self._give_way()
        launched = self._launch()
        collected, self.in_flight = self.in_flight, launched
        if collected is not None:
            with self.trace.phase(WAIT):
                self._tend(collected.pending)
            self._collect(collected)
        if launched is not None and launched.guided and launched.pending.ready():  # always so on a CPU
            self._collect(launched)  # so that the next step finds the masks
            self.in_flight = None
        finished = self.local_prompts.finish()
        self.inbox.report()
        if finished is not None:
            sequence, token = finished
            self.masks.enter(sequence)
            self.scheduler.adopt(sequence)
            self.outputs.append(sequence, [token])

    def _enter(self, sequences: list[DecodeSequence]) -> None:
        """Let sequences with a row join the next step."""
        for sequence in sequences:
            if self.scheduler.active.get(sequence.key) is not sequence:
                self.trace.join([sequence.key])
                self.masks.begin(sequence)
                self.scheduler.activate(sequence)
            self.masks.enter(sequence)

    def _give_way(self) -> None:
        """Take rows, or blocks if none are left, from sequences of worse priority or of clients with more rows."""
        while self.admission.make_room():
            self._enter(self.admission.fill_rows())
        if (victim := self.admission.make_blocks()) is not None:
            self.inbox.fail(victim.key, ErrorCode.PREEMPTED, "out of KV blocks, requests of better priority go first")

    def _tend(self, pending: PendingOutput, wanted: Callable[[], bool] = lambda: True) -> None:
        """Serve sockets and pulls until the step is over, or as long as `wanted`."""
        while not pending.ready() and wanted():
            self.inbox.receive()
            self.admit()
            self.outputs.handle_answers()
            self.outputs.flush()
            self.tend()
            time.sleep(LOOK_INTERVAL_S)

    def _launch(self) -> DecodeStep | None:
        """Start a step over all rows; None if no row can get a token."""
        with self.trace.phase("apply"):
            self._make_slots()
            if self.runner.shares_prefixes:
                self.sharing.tend(self.scheduler.rows)
            self.batch.apply(self.scheduler.rows.take_changes())
        num_rows = len(self.scheduler.rows)
        if not self._can_get_on():
            return None
        with self.trace.phase("launch"):
            rows, launched_s = self.scheduler.rows, time.monotonic()
            spared_bytes = self.sharing.spared_bytes(rows)
            pending = self.runner.launch(num_rows, has_logprobs=rows.has_logprobs, spared_bytes=spared_bytes)
            self.pace.launched(self.runner.bucket(num_rows))
            guided = [sequence for sequence in rows.sequences if sequence.follower is not None]
            unsure = [sequence for sequence in guided if not sequence.has_mask]
            return DecodeStep(pending, self.scheduler.launched(), guided, unsure, launched_s)

    def _make_slots(self) -> None:
        """Get blocks for every row's next token; rows without a block rest. If nothing helps, preempt a sequence."""
        self.scheduler.slots.make()
        while self.scheduler.slots.is_starved(self.scheduler.lingering) and not self.arrivals.make_way():
            victim = self.scheduler.preempt()
            reason = f"{self.offers.shortage}, the youngest sequence makes room"
            self.inbox.fail(victim.key, ErrorCode.PREEMPTED, reason)
            self.scheduler.slots.make()

    def _collect(self, step: DecodeStep) -> None:
        """Read the tokens of a step, and free the blocks of ended sequences."""
        with self.trace.phase("collect"):
            output = step.pending.output()
            self.pace.ended()
            self.link.load.step_ended(step.launched_s, len(step.sequences), len(step.sequences))
            for sequence, tokens in zip(step.sequences, output.rows, strict=True):
                if tokens[0].token_id == NO_CHOICE and sequence in step.unsure:
                    self.scheduler.slots.was_late(sequence)
                else:
                    self.outputs.append(sequence, tokens)
            self.sealing.seal()
            self.scheduler.collected(step.sequences)

    def tend(self) -> None:
        """Keep blocks at hand for every sequence to grow and for handoffs; drain if the memory server is lost."""
        if problem := self.offers.tend(self.pulls.foreseen()):
            self.poller.unregister(self.offers.shared)
            self.drain.ask(problem, at_once=self.offers.shared.is_tainted)
            for key in self.arrivals.give_back_prompts():  # neither blocks nor offers come any more
                self.inbox.fail(key, ErrorCode.DRAINING, problem)

    def beat(self) -> None:
        """Report the load to the heartbeat thread."""
        load = self.link.load
        load.num_running, load.num_handoffs = len(self.scheduler.active), len(self.pulls) + len(self.offers)
        load.num_paused = len(self.scheduler.paused)
        load.num_free_blocks, load.num_dropped_frames = self.engine.allocator.num_unused, self.hub.drops.dropped
        load.spared_bytes = self.runner.spared_bytes
        self.pulls.report(load)
        self.local_prompts.report(load)
        if not load.num_running:
            load.last_step_s = time.monotonic()

    def launch_prompt(self) -> None:
        """Launch a chunk of a prompt computed here behind the step in flight; known tokens are sent first."""
        if not self.local_prompts.choose_chunk():
            return
        if self.in_flight is not None and self.in_flight.pending.ready():  # always so on a CPU
            collected, self.in_flight = self.in_flight, None
            self._collect(collected)
            self.outputs.flush()
        self.local_prompts.launch()

    def give_everything_back(self) -> None:
        """Return every request to the router at the end of a drain."""
        sequences = [*self.scheduler.active.values(), *self.scheduler.reserved.values()]
        for sequence in [*sequences, *self.arrivals.drop_all()]:
            self.inbox.fail(sequence.key, ErrorCode.DRAINING, "the decode worker is shutting down")

    def forget_everything(self) -> None:
        """Drop every request after a restart of the router, because no client waits for the tokens."""
        for sequence in list(self.scheduler.active.values()):
            self.scheduler.end(sequence)
        self.arrivals.drop_all()

    def tell_fault(self, problem: str) -> None:
        """Report a device fault to the owners of other pools mapped here."""
        self.sources.visits.report_fault(problem)

    def close(self) -> None:
        self.trace.finish()
        self.masks.close()
        self.sources.close()
        self.hub.close()
        self.link.close()

    def _await_work(self) -> None:
        """Sleep until a message comes, or a copy or chunk may be over; return at once if a step is due."""
        if self.in_flight is not None or self._can_get_on():
            self.idling.worked()
            return
        if self.pulls.is_copying() or self.scheduler.active or len(self.local_prompts):
            time.sleep(LOOK_INTERVAL_S)
        elif not self.idling.await_message(IDLE_POLL_MS) and self.idling.num_vain >= QUIET_POLLS:
            self.runner.capture_ahead()

    def _can_get_on(self) -> bool:
        """Tell whether some row gets a token in the next step, or in the step in flight."""
        return any(not sequence.awaits_mask for sequence in self.scheduler.rows.sequences)

    def _owns_something(self) -> bool:
        return bool(self.scheduler.active or self.scheduler.lingering or self.arrivals)
