"""The decode worker's loop: receive, admit, launch the next step, collect the last, emit, report.

The next step is launched before the last step's tokens are read (see `steps`). The host works in the shadow of the
step. The launch waits until shortly before the running step ends (see `pace`), so that arriving handoffs join early.

Life of a request here:
    1. `DecodeRequest` announces the request, which waits for the `KVOffer` of its prompt (see `announced`). The offer
       waits for a row and blocks. Blocks in the own pool change owner (see `offers`); blocks of another pool are pulled
       (see `pulls`). A prompt of a `PrefillRequest` waits, too, and is computed here (see `local_prompts`).
    2. The sequence enters a row and gets a token each step. A stop token, max_tokens, `Abort` or preemption ends the
       sequence.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import NamedTuple

import zmq

from common.device.steps.loop_trace import WAIT
from common.device.steps.output_ring import LOOK_INTERVAL_S, PendingOutput
from common.device.steps.prompt_runner import PromptRunner
from common.grammar.followers import Followers
from common.grammar.sequence_grammars import SequenceGrammars
from common.serving.prompts.requests import fail_request
from common.serving.turns.decode_gate import DecodeGate
from common.serving.worker.drain import Drain
from common.serving.worker.idling import Idling
from common.serving.worker.peer_servers import PeerServers
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
from decode_worker.batch.runner import DecodeRunner
from decode_worker.cancellation import Cancellation
from decode_worker.grammar_masks import MaskMemory
from decode_worker.inbox import Inbox
from decode_worker.outputs import Outputs
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sealing import Sealing
from decode_worker.sequences.sequence import DecodeSequence
from decode_worker.sequences.snapshots import Snapshots
from decode_worker.steps import DecodeSteps

IDLE_POLL_MS, QUIET_POLLS = 50, 10
"""Milliseconds of a poll, and polls without a message before spare time is used."""


class Runners(NamedTuple):
    """Launchers of steps on the worker's device."""

    decode: DecodeRunner
    prompts: PromptRunner


class DecodeWorker:
    """Owner of the scheduler, the batch and the sockets; `run` returns when drained."""

    def __init__(
        self,
        config: Config,
        runners: Runners,
        *,
        hub: Hub,
        ready: WorkerReady,
        drain: Drain,
        followers: Followers[DecodeSequence],
        gate: DecodeGate | None = None,
    ) -> None:
        self.engine = engine = runners.decode.engine
        self.runner, self.trace, self.hub, self.drain = runners.decode, runners.decode.trace, hub, drain
        self.poller = zmq.Poller()
        self.link = RouterLink(zmq.Context.instance(), config.net, ready, lambda: self.cancellation.drop_all())
        report = partial(fail_request, self.link)
        chunk_tokens, leases = config.decode.local_chunk_tokens, engine.shared.leases
        self.scheduler = DecodeScheduler(engine.allocator, ready.max_num_seqs, engine.max_len, chunk_tokens)
        self.peers = PeerServers(engine, self.link.worker, self.poller, config)
        self.sources = Sources(engine, self.peers, hub, self.link.send)
        sealing = Sealing(leases, lambda: self.scheduler.capacity.num_growing)
        snapshots = Snapshots(leases, sealing, lambda source_id, target_id: engine.pool.copy(source_id, target_id))

        def end(sequence: DecodeSequence) -> None:
            sealing.seal([sequence])
            snapshots.forget(sequence)

        self.scheduler.on_end = end
        announced = Announced(engine.shared)
        self.pulls = Pulls(engine, self.scheduler, config, self.sources, announced, report)
        self.offers = Offers(engine.shared, self.scheduler, sealing, report)
        self.local_prompts = LocalPrompts(runners.prompts, self.scheduler, leases, config, self.link)
        self.arrivals = Arrivals(announced, self.pulls, self.offers, self.local_prompts)
        self.admission = Admission(self.scheduler, self.arrivals, report)
        self.cancellation = Cancellation(self.scheduler, self.arrivals, report)
        self.grammars, self.masks = SequenceGrammars(followers), MaskMemory(self.runner.batch.grammars)
        self.inbox = Inbox(self.link, hub, self.cancellation, self.grammars, drain, snapshots)
        self.outputs = Outputs(self.link, self.cancellation, sealing, self.grammars, self.masks)
        self.steps = DecodeSteps(self.runner, self.admission, self.outputs, snapshots, gate or DecodeGate())
        for source in (self.link.spoke.socket, hub.socket, engine.shared):
            self.poller.register(source, zmq.POLLIN)
        self.idling = Idling(self.poller, on_gpu=engine.device.type == "cuda")

    def run(self) -> None:
        """Work until drained."""
        while not self.drain.finished(self.cancellation.owns_something or self.link.is_needed()):
            if self.drain.begins():
                self.link.leave()
            self._await_work()
            with self.trace.turn():
                self.turn()
        self.cancellation.return_all()
        self.link.farewell(self.drain.reason)
        self.engine.leave()
        self.close()

    def turn(self) -> None:
        """Receive, launch the next step, collect the last, emit; each part is a method below, in this order."""
        with self.trace.phase("receive"):
            self._receive()
        self.step()
        with self.trace.phase("emit"):
            self.outputs.flush()
            self._lease_blocks()
            self.report_load()
        with self.trace.phase("local prompt"):
            self._launch_prompt()

    def step(self) -> None:
        """Launch the next step shortly before the running step ends, then collect the running step."""
        running = self.steps.in_flight[0].pending if self.steps.in_flight else None
        if running is not None:
            self._serve_until(running, self.steps.pace.should_wait)  # handoffs join the next step meanwhile
        while self.admission.make_room():
            self.steps.enter(self.admission.fill_rows())
        self.admission.make_blocks()
        if self.steps.gate.is_closed():
            self.steps.pace.held_up()
        else:
            self.steps.launch()
        if running is not None:
            self._serve_until(running)
            self.steps.collect()
        if self.steps.in_flight and self.steps.in_flight[0].guided and self.steps.in_flight[0].pending.ready():
            self.steps.collect()  # on a CPU, so that the next step finds the masks
        for sequence, token in self.local_prompts.collect():
            self.masks.enter(sequence)
            self.outputs.append([(sequence, [token])])

    def report_load(self) -> None:
        """Report the load to the heartbeat thread."""
        load, prefixes, local = self.link.load, self.pulls.prefixes, self.local_prompts
        load.num_running, load.num_handoffs = len(self.scheduler.active), self.arrivals.num_handoffs
        load.num_paused, load.num_waiting = len(self.scheduler.paused), len(self.pulls.waiting) + len(local)
        load.num_free_blocks, load.num_dropped_frames = self.engine.allocator.num_unused, self.hub.drops.dropped
        load.spared_bytes, load.pulls = self.runner.spared_bytes, self.pulls.transfers.meter
        load.num_pulled_blocks, load.num_found_blocks = prefixes.num_pulled, prefixes.num_found
        load.prompt_block_us = local.prefixes.rate.block_us(local.prefixes.block_size)
        load.short_prompt_s, load.num_turns = local.short_s, self.steps.gate.num_turns
        if not load.num_running:
            load.last_step_s = time.monotonic()
            self.steps.gate.rest()

    def close(self) -> None:
        self.trace.finish()
        self.grammars.followers.close()
        self.sources.close()
        self.hub.close()
        self.link.close()

    def _receive(self) -> None:
        """Handle messages, answers of grammars, and handoffs; never waits for a copy."""
        self.inbox.receive()
        self.steps.enter([*self.admission.fill_rows(), *self.pulls.transfers.collect()])
        self.pulls.check()
        self.sources.prove_next()
        self.outputs.handle_answers()

    def _serve_until(self, pending: PendingOutput, wanted: Callable[[], bool] = lambda: True) -> None:
        """Serve sockets and pulls until the step is over, or as long as `wanted`."""
        with self.trace.phase(WAIT):
            while not pending.ready() and wanted():
                self._receive()
                self.outputs.flush()
                self._lease_blocks()
                time.sleep(LOOK_INTERVAL_S)

    def _launch_prompt(self) -> None:
        """Launch a chunk of a prompt computed here behind the step in flight; known tokens are sent first."""
        if not (chunks := self.local_prompts.schedule()):
            return
        if self.steps.in_flight and self.steps.in_flight[0].pending.ready():  # always so on a CPU
            self.steps.collect()
            self.outputs.flush()
        self.local_prompts.steps.launch(chunks)

    def _lease_blocks(self) -> None:
        """Keep blocks at hand for every sequence to grow and for handoffs; drain if the memory server is lost."""
        next_pulls = islice(self.pulls.waiting, self.pulls.max_pulls)
        if problem := self.offers.lease_blocks(self.pulls.prefixes.foreseen(next_pulls)):
            self.poller.unregister(self.offers.shared)
            self.drain.ask(problem, at_once=self.offers.shared.is_tainted)
            self.cancellation.return_waiting(problem)

    def _await_work(self) -> None:
        """Sleep until a message comes, or a copy or chunk may be over; return at once if a step is due."""
        if self.steps.in_flight or self.steps.is_due():
            self.idling.worked()
            if not self.steps.in_flight and self.steps.gate.is_closed():
                time.sleep(LOOK_INTERVAL_S)
            return
        is_copying = self.pulls.transfers.under_way or self.sources.proofs
        if is_copying or self.scheduler.active or len(self.local_prompts):
            time.sleep(LOOK_INTERVAL_S)
        elif not self.idling.await_message(IDLE_POLL_MS) and self.idling.num_vain >= QUIET_POLLS:
            self.runner.capture_ahead()
