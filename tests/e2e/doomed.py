"""`python -m tests.e2e.doomed`: a worker that ends, or stands still, at the very message that a test has named.

Before it says it, after it has said it, or when it got it and has not acted on it. A file beside the router's socket
says which: it is looked for at each message, and gone when it has come true, so that the next incarnation lives.
"""

import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from common.memory.base.channel import Channel
from common.wire.messages.worker import Message
from common.wire.transport.sockets import Hub, Spoke

ON_ITS_WAY_S = 0.05
"""For what a thread of ZeroMQ sends."""


class Moment(StrEnum):
    BEFORE = "before"
    AFTER = "after"
    GOT = "got"


class Doom(NamedTuple):
    """When a worker ends: at the n-th message of a kind, counted from when it was foretold."""

    moment: Moment
    kind: type[Message]
    number: int = 1
    ends_by: signal.Signals = signal.SIGKILL

    def __str__(self) -> str:
        return f"{self.moment} {self.kind.__name__} {self.number} {self.ends_by.name}"

    def foretell(self, directory: str, name: str) -> None:
        path = _path(directory, name)
        path.with_suffix(".new").write_text(str(self))
        path.with_suffix(".new").replace(path)


def has_come_true(directory: str, name: str) -> bool:
    return not _path(directory, name).exists()


class Fate:
    """What is foretold of this process."""

    def __init__(self, path: Path) -> None:
        self.path, self.num_met = path, 0

    def meet(self, moment: Moment, message: Message) -> None:
        try:
            foretold, kind, number, name = self.path.read_text().split()
        except FileNotFoundError:
            self.num_met = 0
            return
        if (moment, type(message).__name__) == (foretold, kind):
            self.num_met += 1
            if self.num_met == int(number):
                self.num_met = 0
                time.sleep(ON_ITS_WAY_S if moment is Moment.AFTER else 0.0)
                self.path.unlink()
                os.kill(os.getpid(), signal.Signals[name])

    def say(self, send: Callable[..., Any]) -> Callable[..., Any]:
        def said(*arguments: Any) -> Any:
            [message] = [argument for argument in arguments if isinstance(argument, Message)]
            self.meet(Moment.BEFORE, message)
            result = send(*arguments)
            self.meet(Moment.AFTER, message)
            return result

        return said

    def hear(self, receive: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def heard(*arguments: Any) -> Iterator[Any]:
            for item in receive(*arguments):
                parts = item if isinstance(item, tuple) else (item,)
                [message] = [part for part in parts if isinstance(part, Message)]
                self.meet(Moment.GOT, message)
                yield item

        return heard


def _path(directory: str, name: str) -> Path:
    return Path(directory) / f"doom-{name}"


def main() -> None:
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    name, directory = flags["--worker-id"], Path(flags["--net-router-endpoint"].removeprefix("ipc://")).parent
    fate = Fate(_path(str(directory), name))
    for end in (Channel, Spoke, Hub):
        end.send = fate.say(end.send)  # type: ignore[method-assign]
        end.receive = fate.hear(end.receive)  # type: ignore[method-assign]
    runpy.run_module(f"{name.split('-')[0]}_worker", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
