"""The two endpoints of every connection: a bound `Hub` (ROUTER) and a connecting `Spoke` (DEALER).

Both are synchronous and non-blocking: `receive` returns what has arrived, `send` never waits. A
frame that is malformed, oversized or of another version is counted, logged (at most one line a
second) and dropped. TCP needs a shared secret, from which both ends derive the same CURVE key pair, so that
whoever does not know it cannot even connect; a unix socket is open to its own user alone.
"""

import hashlib
import logging
import time
from collections.abc import Iterator

import zmq
import zmq.utils.z85

from common.base.errors import ConfigError, WireError
from common.settings.config import NetSection
from common.wire.messages.frames import MAX_FRAME_BYTES, decode, encode
from common.wire.messages.worker import Message
from common.wire.transport.endpoints import claim, release, require_protected, restrict
from common.wire.transport.secret import read_secret

logger = logging.getLogger(__name__)

MAX_RECEIVED_AT_ONCE = 1000
"""Messages taken per `receive`, so that a flood cannot starve the caller's loop."""
KEEPALIVE_S = 5
"""After three times so long without an answer a TCP connection counts as broken and is made anew."""


class Hub:
    """Binds; knows its spokes by the identity they chose.

    Args:
        max_frame_bytes: a spoke that sends a larger frame loses its connection before the frame is read.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        net: NetSection,
        endpoint: str,
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        secret = read_secret(net.secret_file)
        require_protected(endpoint, has_secret=secret is not None)
        claim(endpoint)
        self.socket = _socket(context, zmq.ROUTER, net)
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else what is sent to nobody is dropped without a word
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # who reconnects need not wait for its old connection's end
        if secret is not None:
            _use_curve(self.socket, secret, server=True)
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.socket.close()
            raise ConfigError(f"cannot bind {endpoint}: {error}; is another process using it?") from None
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        restrict(self.endpoint)
        self.drops = DropCounter(f"hub {self.endpoint}")

    def send(self, identity: bytes, message: Message) -> bool:
        """Queue for one spoke; dropped when its queue is full, or nobody of that name is connected: then False."""
        try:
            self.socket.send_multipart([identity, encode(message)], flags=zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:  # the caller knows who that was, and what it means
                self.drops.dropped += 1
                logger.debug("%s: nobody is at %r for %s", self.endpoint, identity[:60], type(message).__name__)
                return False
            self.drops.count(f"{type(message).__name__} to {identity!r:.60}: {error}")
        return True

    def receive(self) -> Iterator[tuple[bytes, Message]]:
        """What has arrived, as (identity, message)."""
        for _ in range(MAX_RECEIVED_AT_ONCE):
            try:
                parts = self.socket.recv_multipart(flags=zmq.DONTWAIT)
            except zmq.Again:
                return
            message = self.drops.decoded(parts, 2)
            if message is not None:
                yield parts[0], message

    def refuse(self, identity: bytes, message: Message, why: str) -> None:
        """Drop what was received."""
        self.drops.count(f"{type(message).__name__} of {identity!r:.60}: {why}")

    def close(self, linger_ms: int = 0) -> None:
        """Close; `linger_ms` lets last messages out."""
        release(self.endpoint)
        self.socket.close(linger=linger_ms)


class Spoke:
    """Connects to one hub under a chosen identity; reconnects by itself with back-off.

    Args:
        keep_last: hold one message each way, the newest, while the other end is away.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        net: NetSection,
        endpoint: str,
        identity: bytes,
        *,
        keep_last: bool = False,
    ) -> None:
        secret = read_secret(net.secret_file)
        require_protected(endpoint, has_secret=secret is not None)
        self.socket = _socket(context, zmq.DEALER, net)
        self.socket.setsockopt(zmq.CONFLATE, int(keep_last))
        self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        if secret is not None:
            _use_curve(self.socket, secret, server=False)
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.socket.close()
            raise ConfigError(f"cannot dial {endpoint}: {error}") from None
        self.drops = DropCounter(f"spoke {endpoint}")

    def send(self, message: Message) -> None:
        """Queue for the hub; dropped when the queue is full."""
        try:
            self.socket.send(encode(message), flags=zmq.DONTWAIT)
        except zmq.ZMQError as error:
            self.drops.count(f"{type(message).__name__}: {error}")

    def receive(self) -> Iterator[Message]:
        """What has arrived."""
        for _ in range(MAX_RECEIVED_AT_ONCE):
            try:
                parts = self.socket.recv_multipart(flags=zmq.DONTWAIT)
            except zmq.Again:
                return
            message = self.drops.decoded(parts, 1)
            if message is not None:
                yield message

    def refuse(self, message: Message, why: str) -> None:
        """Drop what was received."""
        self.drops.count(f"{type(message).__name__}: {why}")

    def close(self, linger_ms: int = 0) -> None:
        """Close; `linger_ms` lets a last message out."""
        self.socket.close(linger=linger_ms)


def check(net: NetSection, endpoint: str) -> None:
    """Raise ConfigError for an endpoint that may not be used, or a secret that cannot be read."""
    require_protected(endpoint, has_secret=read_secret(net.secret_file) is not None)


class DropCounter:
    """Counts what was dropped and logs it, at most one line a second."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.dropped = 0
        self._logged_at_s = 0.0

    def decoded(self, parts: list[bytes], num_parts: int) -> Message | None:
        """The message in the last of `num_parts` parts, or None when it was dropped."""
        try:
            if len(parts) != num_parts:
                raise WireError(f"{len(parts)} parts instead of {num_parts}")
            return decode(parts[-1])
        except WireError as error:
            self.count(str(error))
            return None

    def count(self, reason: str) -> None:
        self.dropped += 1
        now_s = time.monotonic()
        if now_s - self._logged_at_s >= 1.0:
            self._logged_at_s = now_s
            logger.warning("%s: dropped a message (%d so far): %s", self.where, self.dropped, reason)


def _socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, net: NetSection) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, net.max_queued_messages)
    socket.setsockopt(zmq.RCVHWM, net.max_queued_messages)
    # Whose machine is gone says no goodbye: the kernel notices. Never ZMTP's own heartbeat: libzmq aborts the
    # process when a ping is due on a connection that has closed while nobody read from it.
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 2)
    socket.setsockopt(zmq.TCP_MAXRT, 3 * KEEPALIVE_S * 1000)
    return socket


def _use_curve(socket: "zmq.Socket[bytes]", secret: bytes, *, server: bool) -> None:
    """The server's public key never travels in clear, so knowing it is the proof of the secret."""
    private = zmq.utils.z85.encode(hashlib.sha256(b"baton curve\0" + secret).digest())
    public = zmq.curve_public(private)
    if server:
        socket.curve_server = True
        socket.curve_secretkey = private
        socket.curve_publickey = public
    else:
        socket.curve_serverkey = public
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
