"""Reads of a pool through staging: its memory server copies blocks into slots, which an agent reads.

A thread goes from slot to slot while pulls are under way, so they do not wait for the worker's steps. Late bytes of a
read arrive in the staging here and never in the pool.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress

from common.base.errors import MemoryLost, MemoryShort
from common.kv.pool import KVPool
from common.kv.staged_copies import StagedCopies, copies_into
from common.kv.staging import Job, Piece, Pipeline, pieces
from common.memory.base.nixl_agent import Agent, AgentError
from common.memory.client.peer_pool_client import LentClaim
from common.memory.client.stager import Stager
from common.memory.devices.backing import CopyFailed

PAUSE_S = 200e-6
"""Between two looks of the thread, which leaves the interpreter to others meanwhile."""

UNEXPECTED = "the thread of staged reads ended; see the log of this worker"


class StagedReads:
    """Reads of a visit's pulls (see `DirectReads`)."""

    def __init__(self, agent: Agent, claim: LentClaim, target: KVPool) -> None:
        assert claim.slots is not None and claim.open_stager is not None, "the claim is of staging"
        self._agent, self._claim, self._target, self._slots = agent, claim, target, claim.slots
        self._open_stager = claim.open_stager
        self._peer = agent.meet(claim.metadata)
        self._pipeline: Pipeline | None = None
        self._copies: StagedCopies | None = None
        self._has_work, self._is_ready, self._is_closing = threading.Event(), threading.Event(), False
        self._problem = UNEXPECTED
        self._thread = threading.Thread(target=self._run, name="staged reads", daemon=True)
        self._thread.start()
        self._is_ready.wait()
        if self._problem:
            self._thread.join()
            self.free()
            raise AgentError(self._problem)

    def begin(self, groups: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Callable[[], bool]:
        assert self._pipeline is not None, "the thread is ready"
        job = Job(pieces(self._claim.shape, self._target.shape, groups, self._slots.slot_bytes))
        self._pipeline.waiting.append(job)
        self._has_work.set()

        def is_over() -> bool:
            if self._problem and not job.is_over:
                raise AgentError(self._problem)
            return job.is_over

        return is_over

    def close(self) -> None:
        """Begin no more; waits for calls of the agent to return."""
        self._is_closing = True
        self._has_work.set()
        self._thread.join()

    def free(self) -> None:
        """Wait until nothing writes into the pool any more."""
        if self._copies is not None:
            with suppress(CopyFailed):  # a device with a fault copies no more
                self._copies.finish()

    def _run(self) -> None:
        """Work until `close`; whatever ends the thread before is a problem of all pulls."""
        try:
            self._copies = copies = copies_into(self._target, self._slots.num_bytes)
            self._agent.register(copies.staging.address, copies.staging.content.nbytes)
            with closing(self._open_stager()) as stager:
                self._work(_Steps(self._agent, self._peer, self._claim, stager, copies))
        except (AgentError, MemoryLost, MemoryShort, CopyFailed) as error:
            self._problem = str(error)
        finally:
            self._problem = self._problem or UNEXPECTED
            self._is_ready.set()

    def _work(self, steps: "_Steps") -> None:
        self._pipeline, self._problem = Pipeline(steps, self._slots.num_slots), ""
        self._is_ready.set()
        while not self._is_closing:
            self._has_work.wait()
            self._has_work.clear()
            while self._pipeline.turn() and not self._is_closing:
                time.sleep(PAUSE_S)


class _Steps:
    """Work on the slots of a visit (see `Steps`)."""

    def __init__(self, agent: Agent, peer: str, claim: LentClaim, stager: Stager, copies: StagedCopies) -> None:
        assert claim.slots is not None, "the claim is of staging"
        self._agent, self._peer, self._stager, self._copies = agent, peer, stager, copies
        self._there, self._slot_bytes = claim.address, claim.slots.slot_bytes

    def stage(self, number: int, slot: int, piece: Piece) -> None:
        self._stager.stage(number, slot, piece.source_ids)

    def staged(self) -> Iterable[int]:
        return self._stager.staged()

    def read(self, slot: int, piece: Piece) -> int:
        place = slot * self._slot_bytes
        return self._agent.read_range(
            self._copies.staging.address + place, self._peer, self._there + place, piece.num_bytes
        )

    def is_read(self, handle: int) -> bool:
        return self._agent.is_read(handle)

    def copy(self, slot: int, piece: Piece) -> None:
        self._copies.begin(piece.target_ids, slot * self._slot_bytes)

    def num_copied(self) -> int:
        return self._copies.num_over()
