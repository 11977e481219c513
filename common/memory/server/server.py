"""The memory server's loop: a single thread, which waits only for messages.

A connection owns its worker's claims. Only processes of the server's user may connect, to a socket in a private
directory.
"""

import faulthandler
import logging
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from common.base.errors import MemoryShort
from common.memory.base.channel import Gone, HungUp
from common.memory.blocks.answers import ProtocolError
from common.memory.devices.backing import Backing
from common.memory.host_tier.tier import make_tier
from common.memory.server.allocations import Allocations
from common.memory.server.announcer import Announcer
from common.memory.server.connections import Client, Connections
from common.memory.server.gate_process import GateProcess
from common.memory.server.listener import Listener
from common.memory.server.messages import Messages
from common.memory.server.pools import Pools
from common.memory.server.processes import Processes
from common.memory.server.regions import Regions
from common.memory.server.report import heartbeat, log_of
from common.memory.server.staging import Stagings
from common.settings.memory_sections import MemorySection
from common.wire.messages.memory import MemoryRefused
from common.wire.messages.memory_reports import MemoryHeartbeat

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.5
COPY_INTERVAL_S = 0.001
"""Turn while host copies run; shorter turns beside a GPU (see `poller`)."""
HELLO_S = 10.0
LINGER_S = 60.0
"""Life of a process after its connection, before the log warns of its blocks."""
HUNG_S = 60.0
"""Silence of a block holder while others wait; live loops knock every second."""
STALL_S = 60.0
"""Silence of a filler while others wait for its region."""
WATCHDOG_S = 30.0
"""Silence of the loop before the end of the process; by then workers have given the server up."""
REARM_S = 1.0
"""Shortest time between two starts of the watchdog's timer."""


class Watchdog:
    """A timer thread that needs no interpreter: ends a hung process, which a supervisor or a worker replaces.

    Dumps all stacks to stderr, and exits with 1.
    """

    def __init__(self, limit_s: float = WATCHDOG_S) -> None:
        self.limit_s, self._armed_s = limit_s, 0.0

    def alive(self) -> None:
        """Start the timer again; call at each turn of a loop."""
        now_s = time.monotonic()
        if now_s - self._armed_s > REARM_S:
            self._armed_s = now_s
            faulthandler.dump_traceback_later(self.limit_s, exit=True)

    def stop(self) -> None:
        """Cancel the timer."""
        faulthandler.cancel_dump_traceback_later()


class MemoryServer:
    """Server of a device's memory until `stop`, or `section.linger_s` without a worker.

    The caller closes the announcer.
    """

    def __init__(self, path: Path, backing: Backing, announcer: Announcer, section: MemorySection) -> None:
        self.path = path
        self.linger_s, self.used_s = section.linger_s, time.monotonic()
        self.backing = backing
        self.announcer = announcer
        self.regions = Regions(backing, logger.info)
        self.tier = make_tier(backing, section)
        self.pools = Pools(self.regions.allocate, section.decode_reserve, poisons=section.poison_blocks, tier=self.tier)
        self.allocations = Allocations(self.regions, self.pools)
        self.processes = Processes(backing.settle_s)
        self.connections = Connections(Listener(path), self.processes, backing.awake_s)
        self.clients = self.connections.clients
        self.ended: dict[int, Client] = {}  # gone clients with quarantined blocks
        self.stagings = Stagings(backing)
        self.messages = Messages(announcer.ready, self.clients, self.allocations, self.processes, self.stagings)
        self.is_stopped = False
        self._gate: GateProcess | None = None
        announcer.log_of = partial(log_of, self.pools)
        announcer.announce()

    def run(self, at_each_turn: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop`, which a signal handler may call."""
        while not self.is_stopped:
            at_each_turn()
            is_copying = self.stagings.is_busy or (self.tier is not None and self.tier.is_busy)
            self.turn(COPY_INTERVAL_S if is_copying else min(LOOK_INTERVAL_S, self.announcer.due_s))

    def stop(self) -> None:
        self.is_stopped = True

    def use_gate(self, gate: GateProcess) -> None:
        """Name a gate to workers from now on, and keep the gate alive."""
        self._gate, self.messages.gate = gate, gate.endpoint

    def turn(self, wait_s: float) -> None:
        """Handle events within `wait_s`, and due work."""
        for client in self.connections.wait(wait_s):
            self._guard(client, self._serve)
        self._update()
        self.announcer.update(self._heartbeat)
        self.is_stopped = self.is_stopped or self.announcer.is_leaving

    def close(self) -> None:
        """Close all connections and memory; mappings of clients stay valid."""
        if self._gate is not None:
            self._gate.close()
        self.connections.close()
        self.processes.close()
        self.stagings.close()
        self.pools.close()
        self.regions.close()

    def _guard(self, client: Client, work: Callable[[Client], None]) -> None:
        """Do work for a client; remove the client if the work says so."""
        try:
            work(client)
        except (Gone, ProtocolError) as reason:
            self._remove(client, reason)

    def _serve(self, client: Client) -> None:
        """Go on sending, and handle arrived messages; raises Gone and ProtocolError."""
        self.connections.flush(client)
        for message, descriptor in client.channel.receive():
            client.received_s = time.monotonic()
            self.connections.send(self.messages.handle(client, message, descriptor))

    def _update(self) -> None:
        """Do due work: grants, restores, silent clients, ended processes; stop after `linger_s` without a worker."""
        now_s = time.monotonic()
        if self._gate is not None:
            self._gate.update()
        self.connections.send(self.pools.update())
        self.stagings.free()
        for client in list(self.clients.values()):
            self._guard(client, self._update_client)
        for number in self.processes.over():
            if number in self.ended:
                client = self.ended.pop(number)
                num_kept = self.pools.num_quarantined(number)
                logger.info("%s: its process is over, and its %d KV blocks are free", client, num_kept)
            self.connections.send(self.pools.reclaim(number))
        for client in self.ended.values():
            if now_s - client.ended_s > LINGER_S:
                client.ended_s = math.inf
                logger.warning(
                    "%s: its process lives on %.0f s after its connection ended, and nobody gets its %d KV blocks "
                    "until it is over: end it", client, LINGER_S, self.pools.num_quarantined(client.number),
                )  # fmt: skip
        if self.ended or any(client.worker for client in self.clients.values()):
            self.used_s = now_s
        elif self.linger_s and now_s - self.used_s > self.linger_s:
            logger.info("no worker for %.0f s (memory.linger_s)", self.linger_s)
            self.stop()

    def _update_client(self, client: Client) -> None:
        """Send unsent messages and grant memory; raises Gone for a client to drop."""
        silent_s = time.monotonic() - client.received_s
        if client.gone is not None:
            raise client.gone
        self.connections.flush(client)
        self.connections.send(self.allocations.grant(client))
        self._stage(client)
        self.connections.select(client)
        if not client.worker and silent_s > HELLO_S:
            raise Gone(f"it has not said who it is for {HELLO_S:.0f} s")
        if client.is_running and silent_s > HUNG_S and self.pools.holds_up_others(client.number):
            self._end_process(client, silent_s)
        if silent_s > STALL_S and self.regions.holds_up_others(client.number):
            raise Gone(f"it fills a region that others wait for, and has not got on for {STALL_S:.0f} s")

    def _stage(self, client: Client) -> None:
        """Tell a peer what is staged; raises Gone."""
        try:
            self.connections.send(self.stagings.update(client.number))
        except MemoryShort as short:
            client.channel.send(MemoryRefused(str(short)))
            raise Gone(f"it wants more than there is: {short}") from None

    def _end_process(self, client: Client, silent_s: float) -> None:
        """Kill a hung worker, whose blocks are free only after its process; drop a hung peer, which only reads."""
        if client.is_peer:
            raise Gone(f"it has claims on KV blocks that others wait for, and hangs for {silent_s:.0f} s")
        client.received_s = time.monotonic()
        try:
            self.processes.end(client.number)
            logger.warning("%s has KV blocks that others wait for, and hangs for %.0f s: killed", client, silent_s)
        except OSError as error:
            logger.error("%s has KV blocks that others wait for, and hangs for %.0f s; it cannot be killed from here "
                         "(%s): restart it", client, silent_s, error.strerror)  # fmt: skip

    def _heartbeat(self) -> MemoryHeartbeat:
        worker_ids = (c.worker[0] for c in self.clients.values() if c.worker and not c.is_peer)
        return heartbeat(self.announcer.ready, self.backing, self.regions, self.pools, worker_ids)

    def _remove(self, client: Client, reason: Gone | ProtocolError) -> None:
        """Drop a client, and tell the router of a hang-up. A dropped live worker leaves the router by itself."""
        has_left = isinstance(reason, HungUp)
        if has_left and client.worker and not client.is_peer:
            self.announcer.report_ended(*client.worker)
        is_probe = has_left and not client.worker  # health probes come every few seconds
        why = f"its message is refused: {reason}" if isinstance(reason, ProtocolError) else str(reason)
        self.connections.remove(client)
        self.processes.leave(client.number)
        self.stagings.leave(client.number)
        self.connections.send([*self.regions.leave(client.number), *self.pools.leave(client.number)])
        if num_kept := self.pools.num_quarantined(client.number):
            self.ended[client.number], client.ended_s = client, time.monotonic()
            why += f"; its {num_kept} KV blocks are kept until its process is over"
        logger.log(logging.DEBUG if is_probe else logging.INFO, "%s: %s", client, why)
