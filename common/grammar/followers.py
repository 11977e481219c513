"""Threads in which grammars are followed, beside a worker's loop.

llguidance frees the interpreter lock while it works, mostly for microseconds, at most for what its limits allow. A
worker asks for what follows a token, and takes what is known whenever it looks; it never waits.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread, stack_size
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from common.grammar.end_tokens import end_token_ids
from common.grammar.follower import Follower, Outcome

if TYPE_CHECKING:
    from common.grammar.grammars import Grammars

logger = logging.getLogger(__name__)

Owner = TypeVar("Owner")
Job = tuple[Owner, Follower, Sequence[int]]
MAX_THREADS = 4
STACK_BYTES = 16 << 20
"""Of each thread: llguidance recurses, and what has been compiled with less room (`router.grammar_main`) fits."""
LOAD_TIMEOUT_S, END_TIMEOUT_S = 30.0, 1.0
DEADLINE_S = 30.0
"""Far more than limits let a grammar take, behind others, while its library loads the model's tokens."""


def make_followers(path: Path, vocab: int) -> "Followers[Any]":
    """For the model in directory `path`, of `vocab` tokens."""

    def load() -> "Grammars":
        from common.grammar.grammars import Grammars  # in its thread, so that no start waits for it

        return Grammars.of_model(path, vocab, end_token_ids(path))

    return Followers(load)


class Followers(Generic[Owner]):
    """Follows grammars for owners, of which each asks for one thing at a time.

    Args:
        make_grammars: called once, in a thread, as it takes a second for a large vocabulary.
    """

    def __init__(self, make_grammars: "Callable[[], Grammars]", num_threads: int = MAX_THREADS) -> None:
        self._asked_s: dict[Owner, float] = {}  # who waits since when, the longest first
        self._make_grammars = make_grammars
        self._grammars: Grammars | None = None
        self._problem = ""
        self._jobs: SimpleQueue[Job[Owner] | None] = SimpleQueue()
        self._outcomes: deque[tuple[Owner, Outcome]] = deque()
        self._threads = [Thread(target=self._work, name=f"grammar-{i}", daemon=True) for i in range(num_threads)]
        self._beginning = Thread(target=self._begin, name="grammars", daemon=True)
        self._beginning.start()

    def ask(self, owner: Owner, follower: Follower, token_ids: Sequence[int]) -> None:
        """Have it follow these tokens."""
        self._asked_s[owner] = time.monotonic()
        self._jobs.put((owner, follower, token_ids))

    def take(self) -> list[tuple[Owner, Outcome]]:
        """What has become known since the last call; who has waited too long learns that."""
        found = [self._outcomes.popleft() for _ in range(len(self._outcomes))]
        taken = [(owner, outcome) for owner, outcome in found if self._asked_s.pop(owner, None) is not None]
        while self._asked_s and time.monotonic() > next(iter(self._asked_s.values())) + DEADLINE_S:
            owner = next(iter(self._asked_s))
            del self._asked_s[owner]
            taken.append((owner, Outcome(problem=f"its grammar said nothing for {DEADLINE_S:g} s")))
        return taken

    @property
    def num_pending(self) -> int:
        """Asked for and not taken."""
        return len(self._asked_s)

    def close(self) -> None:
        """End the threads; one in the midst of a mask is not waited for for long.

        But what loads is: Python cannot end beside a library that is being imported, and the process would crash.
        """
        self._beginning.join(LOAD_TIMEOUT_S)
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(END_TIMEOUT_S)

    def _begin(self) -> None:
        try:
            self._grammars = self._make_grammars()
        except Exception as error:  # whatever a library says of a tokenizer that it cannot read
            self._problem = f"this worker can follow no grammars: {error!s:.200}"
            logger.exception("this worker can follow no grammars")
        usual = stack_size(STACK_BYTES)
        try:
            for thread in self._threads:
                thread.start()
        finally:
            stack_size(usual)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            owner, follower, token_ids = job
            self._outcomes.append((owner, self._follow(follower, token_ids)))

    def _follow(self, follower: Follower, token_ids: Sequence[int]) -> Outcome:
        if self._grammars is None:
            return Outcome(problem=self._problem)
        try:
            return follower.follow(self._grammars, token_ids)
        except Exception as error:  # a bug that one grammar meets is not to end the thread
            logger.exception("following a grammar failed")
            return Outcome(problem=f"following the grammar failed: {error!s:.200}")
