"""Means shared by all handlers of members' messages."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from common.settings.config import NetSection
from common.wire.messages.worker import Knock, Message
from router.dispatch.incidents import Incidents

SendTo = Callable[[bytes, Message], bool]
"""Function to queue a message for a connection; returns False when the connection is gone."""


@dataclass(frozen=True, slots=True)
class Links:
    """Connections of the router to workers and memory servers, with their time limits and the log of incidents."""

    net: NetSection
    router_epoch: int
    send: SendTo
    clock: Callable[[], float] = time.monotonic
    incidents: Incidents = field(default_factory=Incidents)

    def knock(self, connection: bytes) -> bool:
        """Send a knock; return whether the connection exists."""
        return self.send(connection, Knock(self.router_epoch))
