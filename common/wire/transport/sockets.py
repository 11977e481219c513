"""The two ends of every connection: a bound `Hub` (ROUTER) and a connecting `Spoke` (DEALER).

Both are synchronous and non-blocking: `receive` returns arrived messages, `send` never waits. A malformed, oversized or
foreign-version frame is counted, logged (at most a line a second) and dropped. TCP needs a shared secret. Both ends
derive the server's CURVE key pair from the secret, so a process without the secret cannot even connect. A unix socket
is open only to its user.
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
from common.wire.transport.endpoints import (
    AUTO,
    claim,
    release,
    require_protected,
    resolved,
    restrict,
    unbound,
)
from common.wire.transport.secret import read_secret

logger = logging.getLogger(__name__)

MAX_RECEIVED_AT_ONCE = 1000
"""Most messages per `receive`, so a flood cannot starve the caller's loop."""
KEEPALIVE_S = 5
"""A TCP connection without an answer for three times `KEEPALIVE_S` seconds is reconnected."""


class Hub:
    """A bound socket; spokes are known by their chosen identity.

    Args:
        max_frame_bytes: a spoke with a larger frame loses the connection before the frame is read.
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
        self.socket = _socket(context, zmq.ROUTER, net, endpoint)
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else messages to an absent spoke are dropped silently
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnecting spoke need not wait
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
        """Queue for a spoke; a full queue drops the message. With an absent spoke, drop and return False."""
        try:
            self.socket.send_multipart([identity, encode(message)], flags=zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:  # the caller knows whether to log
                self.drops.dropped += 1
                logger.debug("%s: nobody is at %r for %s", self.endpoint, identity[:60], type(message).__name__)
                return False
            self.drops.count(f"{type(message).__name__} to {identity!r:.60}: {error}")
        return True

    def receive(self) -> Iterator[tuple[bytes, Message]]:
        """Yield arrived messages, as (identity, message)."""
        for _ in range(MAX_RECEIVED_AT_ONCE):
            try:
                parts = self.socket.recv_multipart(flags=zmq.DONTWAIT)
            except zmq.Again:
                return
            message = self.drops.decoded(parts, 2)
            if message is not None:
                yield parts[0], message

    def refuse(self, identity: bytes, message: Message, why: str) -> None:
        """Count a received message as dropped."""
        self.drops.count(f"{type(message).__name__} of {identity!r:.60}: {why}")

    def close(self, linger_ms: int = 0) -> None:
        """Close; `linger_ms` lets last messages out."""
        release(self.endpoint)
        self.socket.close(linger=linger_ms)


class Spoke:
    """A socket connected to a hub under a chosen identity; reconnects by itself with back-off.

    Args:
        keep_last: keep only the newest message in each direction while the other end is away.
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
        self.socket = _socket(context, zmq.DEALER, net, endpoint)
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
        """Yield arrived messages."""
        for _ in range(MAX_RECEIVED_AT_ONCE):
            try:
                parts = self.socket.recv_multipart(flags=zmq.DONTWAIT)
            except zmq.Again:
                return
            message = self.drops.decoded(parts, 1)
            if message is not None:
                yield message

    def refuse(self, message: Message, why: str) -> None:
        """Count a received message as dropped."""
        self.drops.count(f"{type(message).__name__}: {why}")

    def close(self, linger_ms: int = 0) -> None:
        """Close; `linger_ms` lets a last message out."""
        self.socket.close(linger=linger_ms)


def handoff_endpoint(net: NetSection, name: str) -> str:
    """Return where a decode worker binds for prefill workers; raises ConfigError."""
    if net.handoff_endpoint == AUTO and net.advertise:
        return unbound(net.advertise)
    return resolved(net.handoff_endpoint, name)


def check(net: NetSection, endpoint: str) -> None:
    """Raise ConfigError for an unprotected endpoint or an unusable secret."""
    require_protected(endpoint, has_secret=read_secret(net.secret_file) is not None)


class DropCounter:
    """A counter of dropped messages; logs at most a line a second."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.dropped = 0
        self._logged_at_s = 0.0

    def decoded(self, parts: list[bytes], num_parts: int) -> Message | None:
        """Decode the last of `num_parts` parts; None for a dropped message."""
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


def _socket(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, net: NetSection, endpoint: str
) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, net.max_queued_messages)
    socket.setsockopt(zmq.RCVHWM, net.max_queued_messages)
    # TCP keepalive detects a dead machine. Never use ZMTP's own heartbeat: libzmq aborts the process when a ping is
    # due on a connection that closed without a reader.
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 2)
    socket.setsockopt(zmq.TCP_MAXRT, 3 * KEEPALIVE_S * 1000)
    return socket


def _use_curve(socket: "zmq.Socket[bytes]", secret: bytes, *, server: bool) -> None:
    """Encrypt a socket. The server's public key never travels in clear, so a client with the key knows the secret."""
    private = zmq.utils.z85.encode(hashlib.sha256(b"baton curve\0" + secret).digest())
    public = zmq.curve_public(private)
    if server:
        socket.curve_server = True
        socket.curve_secretkey = private
        socket.curve_publickey = public
    else:
        socket.curve_serverkey = public
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
