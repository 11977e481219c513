"""The prefill worker's loop: receive, collect, hand off, launch, beat.

The next step is launched during the current step. So the device never waits for the host, which sends a finished step's
tokens and hands blocks off. While steps are in flight the loop sleeps only for moments, because the first token waits
for the end of a step. Sockets are served meanwhile.

Life of a request here:
    1. `PrefillRequest` arrives and waits.
    2. The scheduler admits the request when the pool has blocks for the whole prompt; chunks are launched in steps.
    3. After each step but the last, the decode worker hears of complete blocks and may pull the blocks meanwhile.
    4. After the step of the last chunk, the blocks are offered to the decode worker (see `handoffs`). No offer is made
       if the first token is also the last.
    5. Then the first token is sent to the router.
    6. The decode worker confirms the offer, and the prefill worker forgets the request.
`Abort` ends a request at any time; the router tells the decode worker as well, which declines a later offer.
"""

import logging
import time
from collections import deque

import zmq

from common.device.engine.engine import Engine
from common.device.steps.loop_trace import WAIT
from common.device.steps.output_ring import LOOK_INTERVAL_S
from common.device.steps.prompt_runner import PromptRunner
from common.grammar.followers import Followers
from common.kv.tables import complete_blocks
from common.serving.prompts.prefixes import PromptPrefixes
from common.serving.worker.drain import Drain
from common.serving.worker.idling import Idling
from common.serving.worker.peer_servers import Visits, export_of
from common.settings.config import Config
from common.wire.messages.worker import (
    PromptCached,
    WorkerReady,
)
from common.wire.transport.router_link import RouterLink
from prefill_worker.grammar_masks import PromptMasks
from prefill_worker.handoffs import Delivery
from prefill_worker.inbox import Inbox
from prefill_worker.outputs import Outputs
from prefill_worker.reply_pools import Holders
from prefill_worker.retrievals import Retrievals, Worth
from prefill_worker.scheduler import PromptScheduler
from prefill_worker.sequence import PromptSequence
from prefill_worker.step import PromptStep, launch_chunks
from prefill_worker.targets import Targets

logger = logging.getLogger(__name__)

IDLE_POLL_MS = 100
"""Longest sleep without a message."""
AT_HAND_SHARE = 16
"""Divisor of the pool's blocks; the quotient bounds the blocks leased in advance."""
MAX_IN_FLIGHT = 2
"""A step runs and a step is queued; more would only bind prompts to batches earlier."""


class PrefillWorker:
    """The worker, owner of the scheduler and the sockets; `run` returns when drained."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        *,
        runner: PromptRunner,
        ready: WorkerReady,
        drain: Drain,
        followers: Followers[PromptSequence],
    ) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.worker = worker = ready.worker_id, ready.epoch
        self.engine = engine
        self.drain = drain
        self.masks = PromptMasks(followers)
        self.link = RouterLink(context, config.net, ready, lambda: self.inbox.forget_everything())

        def tell_cached(sequence: PromptSequence) -> None:
            self.link.send(PromptCached(*worker, *sequence.key, sequence.num_scheduled_tokens))

        self.prefixes = PromptPrefixes(engine.shared.leases, tell_cached, config.kv)
        self.scheduler = PromptScheduler(
            config.prefill, engine.allocator, engine.max_len, self.prefixes, batching=config.worker.batching
        )
        num_tokens, capacity = config.prefill.max_batch_tokens, engine.allocator.capacity
        num_blocks = engine.pool.layout.most_blocks(num_tokens, num_tokens)
        self.blocks_a_step = tuple(map(min, num_blocks, (count // AT_HAND_SHARE for count in capacity)))
        self.runner, self.trace = runner, runner.trace
        self.in_flight: deque[PromptStep] = deque()  # oldest first
        self.poller = zmq.Poller()
        self.targets = Targets(context, config.net, export_of(engine, worker), self.poller)
        holders = Holders(Visits(engine, worker, self.poller), is_on=ready.takes_replies)
        group = engine.pool.layout.groups[0]
        worth = Worth(self.prefixes.rate, group.block_size, group.block_bytes)
        self.retrievals = Retrievals(engine.pool, holders, self.prefixes, worth)
        self.delivery = Delivery(engine.shared, self.targets, holders, self.link)
        self.inbox = Inbox(self.link, engine, self.scheduler, self.delivery, self.masks, drain)
        self.outputs = Outputs(self.link, self.scheduler, self.delivery, self.masks)
        self.poller.register(self.link.spoke.socket, zmq.POLLIN)
        self.poller.register(engine.shared, zmq.POLLIN)
        self.idling = Idling(self.poller, on_gpu=engine.device.type == "cuda")

    def run(self) -> None:
        """Work until drained."""
        while not self.drain.finished(self.inbox.owns_something() or self.link.is_needed()):
            if self.drain.begins():
                self.link.leave()
            self._await_work()
            with self.trace.turn():
                with self.trace.phase("receive"):
                    self.receive()
                    self.outputs.handle_answers()
                self.step()
                self.tend()
                self.beat()
        self.inbox.give_everything_back()
        self.link.farewell(self.drain.reason)
        self.engine.leave()
        self.close()

    def receive(self) -> None:
        self.inbox.receive()
        self.retrievals.tend()
        self.targets.offer()

    def step(self) -> None:
        """Collect finished steps, then launch a step ahead."""
        while self.in_flight and self.in_flight[0].pending.ready():
            self._collect(self.in_flight.popleft())
        if len(self.in_flight) < MAX_IN_FLIGHT and not self.engine.shared.is_behind:
            self._launch()

    def tend(self) -> None:
        """Keep blocks leased for the next step's prompts; after the memory server's loss, drain."""
        shared = self.engine.shared
        nothing, is_busy = self.engine.pool.layout.nothing, len(self.in_flight) == MAX_IN_FLIGHT
        shared.update(level=self.blocks_a_step, floor=nothing, is_busy=is_busy)
        if problem := shared.take_problem():
            self.poller.unregister(shared)
            self.drain.ask(problem, at_once=shared.is_tainted)
            self.inbox.give_everything_back(problem)  # neither leases nor offers work without the memory server

    def beat(self) -> None:
        """Update the load for the heartbeat thread."""
        load = self.link.load
        scheduler = self.scheduler
        load.num_waiting, load.num_running = len(scheduler.waiting), len(scheduler.running) + len(scheduler.ending)
        load.num_free_blocks = self.engine.allocator.num_unused
        load.num_dropped_frames = self.targets.num_dropped_frames()
        load.prompt_block_us, load.taking_us = self.prefixes.block_us, int(self.retrievals.worth.taking_us)
        load.num_pulled_blocks, load.pulls = self.retrievals.num_pulled, self.retrievals.meter
        if not load.num_running:
            load.last_step_s = time.monotonic()

    def tell_fault(self, problem: str) -> None:
        """Report a device fault to the memory servers of other pools mapped here."""
        self.retrievals.holders.visits.report_fault(problem)

    def close(self) -> None:
        self.trace.finish()
        self.masks.followers.close()
        self.retrievals.holders.close()
        self.targets.close()
        self.link.close()

    def _await_work(self) -> None:
        """Sleep until a message comes, or until the next look at the step in flight."""
        if self.in_flight:
            self.idling.worked()
            if not self.in_flight[0].pending.ready():
                time.sleep(LOOK_INTERVAL_S)
        elif self.masks.followers.num_pending or self.engine.shared.is_sending or self.retrievals.is_busy:
            time.sleep(LOOK_INTERVAL_S)
        else:  # waiting prompts need blocks, which come by message
            self.idling.await_message(IDLE_POLL_MS)

    def _launch(self) -> None:
        """Launch the next step, if any prompt is ready."""
        with self.trace.phase("schedule"):
            chunks = self.scheduler.schedule()
        if chunks:
            self.link.load.num_running = max(self.link.load.num_running, len(chunks))  # launching may take long
            with self.trace.phase("launch"):
                self.trace.join(chunk.sequence.key for chunk in chunks)
                self.prefixes.rate.launched(sum(chunk.num_tokens for chunk in chunks))
                self.in_flight.append(launch_chunks(self.runner, chunks))
            self.scheduler.launched(chunks)

    def _collect(self, step: PromptStep) -> None:
        """Send the results of a finished step."""
        with self.trace.phase(WAIT):
            ended = step.ended()
        self.prefixes.rate.ended()
        self.link.load.step_ended(step.launched_s, step.num_tokens, len(step.sequences))
        self.scheduler.collected(step.sequences)
        with self.trace.phase("emit"):
            for sequence, scores in step.scored():
                for message in scores.messages(*self.worker, *sequence.key):
                    self.link.send(message)
            self.prefixes.computed(step.reached(), self.scheduler.waiting)
            self.outputs.emit(
                [(sequence, token, False) for sequence, token in ended if not self.masks.holds(sequence, token)]
            )
            for sequence, num_tokens in step.unfinished():
                if sequence.may_go_on:
                    self.delivery.announce(sequence, complete_blocks(sequence.tables, num_tokens))
