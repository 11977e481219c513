"""Copies from staging in host memory into a pool: by a GPU's copy engines, or by a CPU at once."""

from collections import deque
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch

from common.kv.pool import KVPool
from common.memory.devices.backing import HostPiece, runs_of
from common.memory.devices.cuda_copies import CudaCopies, CudaCopy, pinned_piece
from common.memory.devices.host_backing import pages


class CudaStagedCopies:
    """Copies into a GPU's pool, on a stream of their own, by one thread; `staging` is memory here."""

    def __init__(self, target: KVPool, num_bytes: int) -> None:
        from cuda.bindings import runtime

        device = target.memory.device
        index = device.index if device.index is not None else torch.cuda.current_device()
        runtime.cudaSetDevice(index)
        self._runtime: ModuleType = runtime
        self._stay_out()
        self.staging = pinned_piece(runtime, index, num_bytes)
        self._shape, self._memory = target.shape, _At(target.memory.data_ptr())
        self._copies = CudaCopies(runtime)
        self._under_way: deque[CudaCopy] = deque()

    def begin(self, target_ids: Sequence[int], place: int) -> None:
        """Copy blocks that lie one after the other from byte `place` of the staging; raises CopyFailed."""
        runs = runs_of(self._shape, target_ids, self.staging, place)
        self._under_way.append(self._copies.begin(self._memory, runs, is_out=False))

    def num_over(self) -> int:
        """Return how many copies have ended since the last call; raises CopyFailed."""
        num_over = 0
        while self._under_way and self._under_way[0].took_s() is not None:
            self._under_way.popleft()
            num_over += 1
        return num_over

    def finish(self) -> None:
        """Wait until no copy writes into the pool any more, and free the staging; any thread may call, last."""
        self._stay_out()
        self._copies.finish()
        self.staging.close()

    def _stay_out(self) -> None:
        """Let this thread work while another captures a graph, which by default forbids calls of all threads."""
        mode = self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        self._runtime.cudaThreadExchangeStreamCaptureMode(mode)


class HostStagedCopies:
    """Copies into a CPU's pool, which are over when they have begun; see `CudaStagedCopies`."""

    def __init__(self, target: KVPool, num_bytes: int) -> None:
        self.staging = HostPiece(pages(num_bytes))
        self._shape, self._pool = target.shape, target.memory.numpy()
        self._num_over = 0

    def begin(self, target_ids: Sequence[int], place: int) -> None:
        for run in runs_of(self._shape, target_ids, self.staging, place):
            content = self.staging.content[run.place : run.place + run.num_bytes]
            self._pool[run.offset : run.offset + run.num_bytes] = content
        self._num_over += 1

    def num_over(self) -> int:
        num_over, self._num_over = self._num_over, 0
        return num_over

    def finish(self) -> None:
        self.staging.close()


StagedCopies = CudaStagedCopies | HostStagedCopies


class _At(NamedTuple):
    address: int


def copies_into(target: KVPool, num_bytes: int) -> StagedCopies:
    """Return copies into a pool, through so many bytes of staging; raises MemoryShort and CopyFailed."""
    return (CudaStagedCopies if target.memory.is_cuda else HostStagedCopies)(target, num_bytes)
