"""`python -m tests.e2e.at_need MODULE FLAG...`: a program that starts its helper processes at first need.

A router starts three with itself and a worker one. They take several times as long as the program itself, which is
forked with its imports done, and most systems of tests end without having asked any of them anything.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

from common.grammar import followers
from common.grammar.server_process import ServerProcess
from router.grammar.checks import GrammarChecks
from router.reading.reader import Reader


class FollowersAtNeed(followers.Followers[Any]):
    """Has a server from the first question on, or from the first after the end of another server."""

    def begin(self) -> None:
        if self._asks.num_open:
            super().begin()


def _make_followers(path: Path, vocab: int) -> FollowersAtNeed:
    return FollowersAtNeed(lambda: ServerProcess(path, vocab))


async def _not_yet(_: object) -> None:
    """Start nothing."""


def main() -> None:
    followers.make_followers = _make_followers
    GrammarChecks.warm_up = _not_yet  # type: ignore[method-assign, assignment]
    Reader.warm_up = _not_yet  # type: ignore[method-assign, assignment]
    module, *flags = sys.argv[1:]
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
