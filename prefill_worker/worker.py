"""The prefill worker's loop: receive, collect, hand off, launch, report.

The next step is launched during the current step. So the device never waits for the host, which sends a finished step's
tokens and hands blocks off. While steps are in flight the loop sleeps only for moments, because the first token waits
for the end of a step. Sockets are served meanwhile. An idle worker captures the graphs of steps that it registered
without, so a prompt may wait for a capture, 0.1 s.

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

import time

import zmq

from common.device.engine.engine import Engine
from common.device.steps.output_ring import LOOK_INTERVAL_S
from common.device.steps.prompt_runner import PromptRunner
from common.grammar.followers import Followers
from common.grammar.sequence_grammars import SequenceGrammars
from common.kv.tables import complete_blocks
from common.serving.prompts.order import PromptOrder
from common.serving.prompts.prefixes import PromptPrefixes
from common.serving.prompts.scheduler import PromptScheduler
from common.serving.prompts.steps import PromptSteps
from common.serving.turns.prompt_turns import StepPlans
from common.serving.worker.drain import Drain
from common.serving.worker.idling import Idling
from common.serving.worker.peer_servers import PeerServers, export_of
from common.settings.config import Config, PrefillSection
from common.wire.messages.worker import PromptCached, WorkerReady
from common.wire.transport.router_link import RouterLink
from common.wire.values.kv_layout import Counts, KVLayout
from prefill_worker.handoffs import Handoffs
from prefill_worker.inbox import Inbox
from prefill_worker.outputs import Outputs
from prefill_worker.reply_pools import ReplyPools
from prefill_worker.retrievals import Retrievals, Worth
from prefill_worker.sequence import PrefillSequence
from prefill_worker.targets import Targets

IDLE_POLL_MS = 100
"""Longest sleep without a message."""
QUIET_MS = 5
"""Time without prompts and messages before a missing graph is captured that a step lacked."""
QUIET_POLLS = 10
"""Sleeps in a row without a message before other graphs are captured, as a prompt in that moment waits 0.1 s longer."""
AT_HAND_SHARE = 16
"""Divisor of the pool's blocks; the quotient bounds the blocks leased in advance."""
MAX_IN_FLIGHT = 2
"""A step runs and a step is queued; more would only bind prompts to batches earlier."""


def prompt_order(section: PrefillSection, *, batching: bool) -> PromptOrder:
    """Return the order of prompts; without batching, a step has a single prompt."""
    return PromptOrder(
        max_tokens=section.max_batch_tokens,
        max_seqs=section.max_num_seqs if batching else 1,
        max_mixed_tokens=section.max_mixed_tokens,
        chunking=section.chunking,
    )


def stock(layout: KVLayout, num_blocks: Counts, step_tokens: int) -> Counts:
    """Return the blocks leased in advance, by group, from a pool of `num_blocks`: as many as a step fills.

    States come with prompts, because few are free: a stock would keep them from other workers, or wait for them.
    """
    columns = zip(layout.groups, layout.most_blocks(step_tokens, step_tokens), num_blocks, strict=True)
    return tuple(min(most, count // AT_HAND_SHARE) if group.grows else 0 for group, most, count in columns)


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
        followers: Followers[PrefillSequence],
        plans: StepPlans | None = None,
    ) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.engine, self.runner, self.drain, self.trace = engine, runner, drain, runner.trace
        self.grammars = SequenceGrammars(followers)
        self.link = RouterLink(context, config.net, ready, lambda: self.inbox.forget_everything())
        worker = self.link.worker

        def report_cached(prompt: PrefillSequence) -> None:
            self.link.send(PromptCached(*worker, *prompt.key, prompt.num_scheduled_tokens))

        self.prefixes = PromptPrefixes(engine.shared.leases, report_cached, config.kv)
        order = prompt_order(config.prefill, batching=config.worker.batching)
        self.scheduler = PromptScheduler(order, engine.allocator, engine.max_len, self.prefixes)
        self.steps = PromptSteps(runner, self.scheduler, self.link.send, worker, MAX_IN_FLIGHT, plans)
        self.level = stock(engine.pool.layout, engine.allocator.shape.shares, config.prefill.max_batch_tokens)
        self.poller = zmq.Poller()
        self.targets = Targets(context, config.net, export_of(engine, worker, config.net.advertise), self.poller)
        self.peers = PeerServers(engine, worker, self.poller, config)
        reply_pools = ReplyPools(self.peers, is_on=ready.takes_replies)
        worth = Worth(self.prefixes.rate, engine.pool.layout)
        self.retrievals = Retrievals(engine.pool, reply_pools, self.prefixes, worth)
        self.handoffs = Handoffs(engine.shared, self.targets, reply_pools, self.link)
        self.inbox = Inbox(self.link, engine, self.scheduler, self.handoffs, self.grammars, drain)
        self.outputs = Outputs(self.link, self.scheduler, self.handoffs, self.grammars)
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
                self.turn()
        self.inbox.give_everything_back()
        self.link.farewell(self.drain.reason)
        self.engine.leave()
        self.close()

    def turn(self) -> None:
        """Receive, collect finished steps, launch a step ahead, and report."""
        with self.trace.phase("receive"):
            self.inbox.receive()
            self.retrievals.advance()
            self.targets.export_pool()
            self.outputs.handle_answers()
        while self._collect():
            pass
        if not self.engine.shared.is_behind:
            self._launch()
        self._lease_blocks()
        self.report_load()

    def report_load(self) -> None:
        """Update the load for the heartbeat thread."""
        load, num_waiting = self.link.load, len(self.scheduler.waiting)
        load.num_waiting, load.num_running = num_waiting, len(self.scheduler.prompts) - num_waiting
        load.num_free_blocks = self.engine.allocator.num_unused
        load.num_dropped_frames = self.targets.num_dropped_frames()
        load.prompt_block_us = self.prefixes.rate.block_us(self.prefixes.block_size)
        load.taking_us = int(self.retrievals.worth.taking_us)
        load.num_pulled_blocks, load.pulls = self.retrievals.num_pulled, self.retrievals.meter
        load.num_turns, load.in_turns = self.steps.plans.num_turns, self.steps.plans.in_turns
        if not load.num_running:
            load.last_step_s = time.monotonic()

    def close(self) -> None:
        self.trace.finish()
        self.grammars.followers.close()
        self.retrievals.reply_pools.close()
        self.targets.close()
        self.link.close()

    def _await_work(self) -> None:
        """Sleep until a message comes, or until the next look at the step in flight."""
        if self.steps.in_flight:
            self.idling.worked()
            if not self.steps.in_flight[0].pending.ready():
                time.sleep(LOOK_INTERVAL_S)
        elif self.grammars.followers.num_pending or self.engine.shared.is_sending or self.retrievals.is_busy:
            time.sleep(LOOK_INTERVAL_S)
        elif self.runner.lacked_graphs and not self.scheduler.prompts:
            if not self.poller.poll(QUIET_MS):
                self.runner.capture_ahead()
        elif self.idling.await_message(IDLE_POLL_MS) or self.scheduler.prompts:
            pass  # waiting prompts need blocks, which come by message
        elif self.idling.num_vain >= QUIET_POLLS:
            self.runner.capture_ahead()

    def _launch(self) -> None:
        """Launch the next step, if any prompt is ready."""
        with self.trace.phase("schedule"):
            chunks = self.steps.schedule()
        if chunks:
            self.link.load.num_running = max(self.link.load.num_running, len(chunks))  # launching may take long
            with self.trace.phase("launch in turn" if self.steps.plan.is_turn else "launch"):
                self.steps.launch(chunks)

    def _collect(self) -> bool:
        """Send the results of the oldest step; tell whether it was over."""
        if (collected := self.steps.collect()) is None:
            return False
        step, complete = collected
        self.link.load.step_ended(step.launched_s, step.num_tokens, len(step.prompts))
        with self.trace.phase("emit"):
            self.outputs.append(complete)
            for prompt, num_tokens in step.unfinished():
                if prompt.may_go_on:
                    self.handoffs.announce(prompt, complete_blocks(prompt.tables, num_tokens))
        return True

    def _lease_blocks(self) -> None:
        """Keep blocks leased for the next step's prompts; after the memory server's loss, drain."""
        shared = self.engine.shared
        nothing, is_busy = self.engine.pool.layout.nothing, len(self.steps.in_flight) == MAX_IN_FLIGHT
        shared.update(level=self.level, floor=nothing, is_busy=is_busy)
        if problem := shared.take_problem():
            self.poller.unregister(shared)
            self.drain.ask(problem, at_once=shared.is_tainted)
            self.inbox.give_everything_back(problem)  # neither leases nor offers work without the memory server
