"""Connection of the autoscaler to its router, off the event loop; the router may be absent."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import zmq

from common.base.errors import BatonError
from common.settings.config import NetSection
from common.wire.messages.operator import LoadReport, LoadWanted, RoleChange, Stage
from common.wire.messages.worker import Role
from deploy.autoscale.load import Sample
from deploy.operate.router_client import Operator, dialed
from deploy.processes.console import Console

ASK_S = 2.0
"""Seconds for a router to answer."""

Answer = TypeVar("Answer")


class Line(Protocol):
    """A connection to a router."""

    async def sample(self) -> Sample | None:
        """Return the load of all workers; None without an answer."""
        ...

    async def report(self, name: str, successor: str, role: Role, stage: Stage, text: str) -> None:
        """Report the stage of a role change, for people who watch; lost if the router is absent."""
        ...


class RouterLine:
    """Connection over the workers' wire, dialed for each question, so a restarted router needs no special care."""

    def __init__(self, net: NetSection, console: Console) -> None:
        self._net, self._console = net, console
        self._problem = ""  # last reported problem

    async def sample(self) -> Sample | None:
        report = await self._connected(lambda operator: operator.ask(LoadWanted, LoadReport, ASK_S))
        return None if report is None else Sample(time.monotonic(), report)

    async def report(self, name: str, successor: str, role: Role, stage: Stage, text: str) -> None:
        def saying(operator_id: str, epoch: int) -> RoleChange:
            return RoleChange(operator_id, epoch, name, successor, role, stage, text)

        await self._connected(lambda operator: operator.send(saying))

    async def _connected(self, act: Callable[[Operator], Answer | None]) -> Answer | None:
        """Return the result of `act`; None if the connection fails, which is reported once."""

        def dial() -> Answer | None:
            with dialed(self._net) as operator:
                return act(operator)

        try:
            answer = await asyncio.to_thread(dial)
            self._problem = ""
        except (BatonError, OSError, zmq.ZMQError) as error:
            if self._problem != (problem := f"--autoscale cannot speak to the router: {error}"):
                self._console.say(problem, "W")
            self._problem = problem
            return None
        return answer
