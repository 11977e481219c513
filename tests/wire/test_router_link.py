"""A worker's connection to the router, with a hub in the router's place."""

from dataclasses import replace

import pytest
import zmq

from common.config import NetSection
from common.errors import ConfigError
from common.wire.messages import Role, WorkerReady
from common.wire.router_link import RouterLink
from tests.fakes import LAYOUT

READY = WorkerReady("d", 1, Role.DECODE, 1, "cpu", "m", "f", "t", LAYOUT, 9, 99, 0, 4, "shm", "")


def test_a_name_that_the_router_would_not_read_is_a_wrong_setting() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.raises(ConfigError, match=r"WorkerReady\.worker_id.*1 to 100 printable characters; see worker\.id"):
        RouterLink(context, NetSection(), replace(READY, worker_id="two\nlines"), lambda: None)
    context.term()
