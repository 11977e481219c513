"""The decode workers that this prefill worker hands blocks to.

The router names them; we dial each, offer the pool until it has proven that it can pull, and send it
nothing else before.
"""

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import zmq

from common.config import NetSection
from common.errors import ConfigError
from common.wire.messages import DecodePeer, KVPathResult, KVPoolExport, Message
from common.wire.sockets import Spoke
from common.wire.worker_id import connection_of, is_from

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Between two offers to a peer, twice as long each time: what is in the way may pass, and a proof costs it a moment."""


@dataclass(slots=True)
class Peer:
    """One incarnation of a decode worker."""

    worker_id: str
    epoch: int
    spoke: Spoke
    proven: bool = False
    problem: str = ""  # what the last proof said
    next_offer_s: float = 0.0  # inf when proven
    pause_s: float = FIRST_PAUSE_S  # after the next offer


class Peers:
    """Decode workers by id."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", net: NetSection, export: KVPoolExport, poller: zmq.Poller
    ) -> None:
        self.context = context
        self.net = net
        self.export = export
        self.poller = poller
        self.by_id: dict[str, Peer] = {}

    def join(self, message: DecodePeer) -> None:
        """Dial a decode worker, in place of an earlier incarnation of it.

        One that is known already is offered the pool again: a restarted router waits for its report.
        """
        known = self.by_id.get(message.worker_id)
        if known and known.epoch == message.epoch:
            known.next_offer_s, known.pause_s = 0.0, FIRST_PAUSE_S
            return
        if known:
            self.leave(known.worker_id, known.epoch)
        identity = connection_of(self.export.worker_id, self.export.epoch)
        try:
            spoke = Spoke(self.context, self.net, message.handoff_endpoint, identity)
        except ConfigError as error:
            logger.error("cannot meet decode worker %s: %s", message.worker_id, error)
            return
        self.by_id[message.worker_id] = Peer(message.worker_id, message.epoch, spoke)
        self.poller.register(spoke.socket, zmq.POLLIN)
        logger.info("meeting decode worker %s at %s", message.worker_id, message.handoff_endpoint)

    def leave(self, worker_id: str, epoch: int) -> None:
        """Hang up on a dead incarnation."""
        peer = self.by_id.get(worker_id)
        if peer and peer.epoch == epoch:
            del self.by_id[worker_id]
            self.poller.unregister(peer.spoke.socket)
            peer.spoke.close()

    def offer(self) -> None:
        """Offer the pool to every peer whose next offer is due."""
        now_s = time.monotonic()
        for peer in self.by_id.values():
            if now_s >= peer.next_offer_s:
                peer.next_offer_s = now_s + peer.pause_s
                peer.pause_s = min(2 * peer.pause_s, LONGEST_PAUSE_S)
                peer.spoke.send(self.export)

    def note_result(self, result: KVPathResult) -> None:
        """Note whether a peer can pull from us; one that cannot is offered the pool again."""
        peer = self.by_id.get(result.worker_id)
        if peer is None or peer.epoch != result.epoch:
            return
        peer.proven = not result.error
        if peer.proven:
            peer.next_offer_s = math.inf
        elif result.error != peer.problem:
            logger.error("no KV path to decode worker %s, trying on: %s", peer.worker_id, result.error)
        peer.problem = result.error

    def proven(self, worker_id: str, epoch: int) -> Peer | None:
        """The peer, if it is this incarnation and can pull from us."""
        peer = self.by_id.get(worker_id)
        return peer if peer and peer.epoch == epoch and peer.proven else None

    def receive(self) -> Iterator[tuple[Peer, Message]]:
        """What peers sent, each in its own name."""
        for peer in list(self.by_id.values()):
            for message in peer.spoke.receive():
                if is_from(connection_of(peer.worker_id, peer.epoch), message):
                    yield peer, message
                else:
                    peer.spoke.refuse(message, f"it names another worker than {peer.worker_id}")

    def num_dropped_frames(self) -> int:
        return sum(peer.spoke.drops.dropped for peer in self.by_id.values())

    def close(self) -> None:
        for peer in self.by_id.values():
            peer.spoke.close(linger_ms=200)
