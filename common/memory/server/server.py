"""The memory server's loop: a single thread, which waits only for messages.

A connection owns its worker's claims. Only processes of the server's user may connect, to a socket in a private
directory.
"""

import itertools
import logging
import math
import os
import selectors
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from common.memory.base.channel import Channel, Gone, HungUp
from common.memory.base.poller import Vigil
from common.memory.blocks.answers import Answer, Misbehaved
from common.memory.blocks.pool import User
from common.memory.devices.backing import Backing
from common.memory.host_tier.tier import make_tier
from common.memory.server.announcer import Announcer
from common.memory.server.clients import Client
from common.memory.server.listener import Listener
from common.memory.server.pools import Pools
from common.memory.server.processes import Processes
from common.memory.server.regions import Regions
from common.memory.server.report import heartbeat
from common.memory.server.requests import Wishes
from common.memory.server.taint import taint
from common.settings.memory_sections import MemorySection
from common.wire.messages.memory import (
    MemoryHello,
    MemoryKnock,
    MemoryMessage,
    MemoryRefused,
    MemoryTainted,
    MemoryVisit,
    MemoryWelcome,
    OfBlocks,
    OfGuests,
    PoolWanted,
    WeightsFilled,
    WeightsProgress,
    WeightsWanted,
)
from common.wire.messages.memory_reports import MAX_WORKERS, MemoryHeartbeat
from common.wire.messages.worker import Message

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
MAX_CLIENTS = MAX_WORKERS


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
        tier = make_tier(backing, section)
        self.pools = Pools(self.regions.allocate, section.decode_reserve, poisons=section.poison_blocks, tier=tier)
        self.wishes = Wishes(self.regions, self.pools)
        self.processes = Processes(backing.settle_s)
        self.clients: dict[int, Client] = {}
        self.parted: dict[int, Client] = {}  # gone clients with quarantined blocks
        self.numbers = itertools.count()
        self.is_stopped = False
        self.listener = Listener(path)
        self.selector = selectors.DefaultSelector()
        self.vigil = Vigil(self.selector, backing.awake_s)
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(self.processes, selectors.EVENT_READ)
        announcer.log_of = self.pools.log_of
        announcer.announce()

    def run(self, at_each_turn: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop`, which a signal handler may call."""
        while not self.is_stopped:
            at_each_turn()
            self.turn(COPY_INTERVAL_S if self.pools.is_copying else min(LOOK_INTERVAL_S, self.announcer.due_s))

    def stop(self) -> None:
        self.is_stopped = True

    def turn(self, wait_s: float) -> None:
        """Handle events within `wait_s`, and due work."""
        for key in self.vigil.select(wait_s):
            if key.fileobj is self.listener:
                self._accept()
            elif (client := self.clients.get(key.data)) is not None:
                self._serve(client)
        self._tend()
        self.announcer.tend(self._heartbeat)
        self.is_stopped = self.is_stopped or self.announcer.is_dismissed

    def close(self) -> None:
        """Close all connections and memory; mappings of clients stay valid."""
        self.listener.close()
        for client in list(self.clients.values()):
            client.channel.close()
        self.selector.close()
        self.processes.close()
        self.pools.close()
        self.regions.close()

    def _accept(self) -> None:
        if (accepted := self.listener.accept()) is None:
            return
        connection, process = accepted
        if len(self.clients) >= MAX_CLIENTS:
            logger.warning("a connection of process %d is refused: there are %d", process, MAX_CLIENTS)
            connection.close()
            return
        number = next(self.numbers)
        channel = Channel(connection)
        self.clients[number] = Client(number, channel, process, time.monotonic())
        self.selector.register(channel, selectors.EVENT_READ, number)

    def _serve(self, client: Client) -> None:
        try:
            self._flush(client)
            for message, descriptor in client.channel.receive():
                client.heard_s = time.monotonic()
                self._heed(client, message, descriptor)
        except Gone as gone:
            self._part(client, gone)
        except Misbehaved as problem:
            self._end(client, f"its message is refused: {problem}")

    def _heed(self, client: Client, message: Message, descriptor: int | None) -> None:
        if isinstance(message, MemoryHello):
            self.processes.add(client.number, descriptor)
            self._greet(client, message)
            return
        if descriptor is not None:
            os.close(descriptor)
        if isinstance(message, MemoryVisit):
            self._greet_guest(client, message)
            return
        if client.worker is None:
            raise Misbehaved("it has not said who it is")
        if not isinstance(message, OfGuests if client.is_guest else MemoryMessage):
            raise Misbehaved(type(message).__name__)
        self._answer(self._answers(client, message))

    def _greet_guest(self, client: Client, visit: MemoryVisit) -> None:
        self._greet(client, visit)
        client.is_guest = True
        answers = self.pools.visit(User(client.number, (visit.worker_id, visit.epoch), is_guest=True), visit.pool_id)
        if not answers:
            client.channel.send(MemoryRefused(f"there is no pool {visit.pool_id:x} here, or not any more"))
            raise Gone(f"it wants to visit a pool {visit.pool_id:x}")
        logger.info("%s is a guest, to pull KV blocks", client)
        self._answer(answers)

    def _greet(self, client: Client, hello: MemoryHello | MemoryVisit) -> None:
        """Note a client's identity and send a welcome.

        An incarnation may have a single connection, because the end of a second would pass for the end of the worker.
        """
        worker = hello.worker_id, hello.epoch
        if client.worker or any(other.worker == worker for other in self.clients.values()):
            raise Misbehaved(f"{worker[0]}.{worker[1]:x} is connected already")
        client.worker, client.is_decoding = worker, isinstance(hello, MemoryHello) and hello.is_decoding
        client.channel.send(MemoryWelcome(self.announcer.ready.server_id, self.announcer.ready.epoch))

    def _answers(self, client: Client, message: MemoryMessage) -> Iterable[Answer]:
        match message:
            case WeightsWanted() | PoolWanted() if client.wish is None:
                return self.wishes.add(client, message)
            case WeightsProgress():
                return self.regions.progressed(client.number, message.num_filled)
            case WeightsFilled():
                logger.info("%s has filled its region of %.2f GB", client, message.num_bytes / 1e9)
                return self.regions.filled(client.number)
            case MemoryKnock():
                client.is_running = True
                return [Answer(client.number, MemoryKnock(self.pools.num_done(client.number)))]
            case MemoryTainted():
                return taint(client, message.problem, self.clients, self.regions, self.pools)
            case _ if isinstance(message, OfBlocks):
                return self.pools.heed(client.number, message)
            case _:
                raise Misbehaved(type(message).__name__)

    def _answer(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            client = self.clients[answer.client]
            try:
                client.channel.send(answer.message, answer.descriptor)
            except HungUp:
                logger.debug("%s is gone; its end is read next", client)
            except Gone as gone:
                client.gone = gone  # dropped in the next turn, because another client's end may be in progress

    def _flush(self, client: Client) -> None:
        """Go on sending. After a hang-up the client's last messages are still read before the end."""
        try:
            client.channel.flush()
        except HungUp:
            client.channel.unsent.clear()

    def _tend(self) -> None:
        """Do due work: grants, restores, silent clients, ended processes."""
        now_s = time.monotonic()
        self._answer(self.pools.tend())
        for client in list(self.clients.values()):
            try:
                self._tend_client(client, now_s - client.heard_s)
            except Gone as gone:
                self._part(client, gone)
            except Misbehaved as problem:
                self._end(client, f"its message is refused: {problem}")
        for number in self.processes.over():
            if number in self.parted:
                client = self.parted.pop(number)
                num_kept = self.pools.num_quarantined(number)
                logger.info("%s: its process is over, and its %d KV blocks are free", client, num_kept)
            self._answer(self.pools.cure(number))
        self._linger(now_s)
        for client in self.parted.values():
            if now_s - client.parted_s > LINGER_S:
                client.parted_s = math.inf
                logger.warning(
                    "%s: its process lives on %.0f s after its connection ended, and nobody gets its %d KV blocks "
                    "until it is over: end it", client, LINGER_S, self.pools.num_quarantined(client.number),
                )  # fmt: skip

    def _linger(self, now_s: float) -> None:
        """Stop after `linger_s` without a worker, if set."""
        if self.parted or any(client.worker for client in self.clients.values()):
            self.used_s = now_s
        elif self.linger_s and now_s - self.used_s > self.linger_s:
            logger.info("no worker for %.0f s (memory.linger_s)", self.linger_s)
            self.stop()

    def _tend_client(self, client: Client, silent_s: float) -> None:
        """Send unsent messages and grant wishes; raises Gone for a client to drop."""
        if client.gone is not None:
            raise client.gone
        self._flush(client)
        self._answer(self.wishes.grant(client))
        self._await(client)
        if not client.worker and silent_s > HELLO_S:
            raise Gone(f"it has not said who it is for {HELLO_S:.0f} s")
        if client.is_running and silent_s > HUNG_S and self.pools.holds_up_others(client.number):
            self._end_process(client, silent_s)
        if silent_s > STALL_S and self.regions.holds_up_others(client.number):
            raise Gone(f"it fills a region that others wait for, and has not got on for {STALL_S:.0f} s")

    def _end_process(self, client: Client, silent_s: float) -> None:
        """Kill a hung worker, whose blocks are free only after its process; drop a hung guest, which only reads."""
        if client.is_guest:
            raise Gone(f"it has claims on KV blocks that others wait for, and hangs for {silent_s:.0f} s")
        client.heard_s = time.monotonic()
        try:
            self.processes.end(client.number)
            logger.warning("%s has KV blocks that others wait for, and hangs for %.0f s: killed", client, silent_s)
        except OSError as error:
            logger.error("%s has KV blocks that others wait for, and hangs for %.0f s; it cannot be killed from here "
                         "(%s): restart it", client, silent_s, error.strerror)  # fmt: skip

    def _await(self, client: Client) -> None:
        """Select a client for reading, and for writing if messages are unsent."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.channel.unsent else 0)
        if self.selector.get_key(client.channel).events != events:
            self.selector.modify(client.channel, events, client.number)

    def _heartbeat(self) -> MemoryHeartbeat:
        worker_ids = (c.worker[0] for c in self.clients.values() if c.worker and not c.is_guest)
        return heartbeat(self.announcer.ready, self.backing, self.regions, self.pools, worker_ids)

    def _part(self, client: Client, gone: Gone) -> None:
        """Drop a client, and tell the router of a hang-up. A dropped live worker leaves the router by itself."""
        has_left = isinstance(gone, HungUp)
        if has_left and client.worker and not client.is_guest:
            self.announcer.tell_ended(*client.worker)
        is_probe = has_left and not client.worker  # health probes come every few seconds
        self._end(client, str(gone), logging.DEBUG if is_probe else logging.INFO)

    def _end(self, client: Client, why: str, level: int = logging.INFO) -> None:
        self.selector.unregister(client.channel)
        client.channel.close()
        del self.clients[client.number]
        self.processes.leave(client.number)
        self._answer([*self.regions.leave(client.number), *self.pools.leave(client.number)])
        if num_kept := self.pools.num_quarantined(client.number):
            self.parted[client.number], client.parted_s = client, time.monotonic()
            why += f"; its {num_kept} KV blocks are kept until its process is over"
        logger.log(level, "%s: %s", client, why)
