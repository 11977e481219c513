"""What a mapped pool really holds, asked of a driver that answers as the test says."""

import ctypes
import enum
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from common.base.errors import TransferFailed
from common.memory.client.client import PoolClaim
from common.wire.values.pool_shape import PoolShape
from tests.support.messages import LAYOUT

HANDLE = ctypes.create_string_buffer(64)

ADDRESS = 0x7F00_0020_0000
NUM_BLOCKS = 9
NUM_BYTES = NUM_BLOCKS * LAYOUT.groups[0].block_bytes


class Result(enum.Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_FOUND = 500


class Cuda:
    """Driver and runtime; `range_of` is what the driver says of an address."""

    def __init__(self) -> None:
        self.closed: list[int] = []
        self.range_of: Callable[[int], tuple[Any, ...]] = lambda address: (Result.CUDA_SUCCESS, address, NUM_BYTES)
        self.driver = SimpleNamespace(CUresult=Result, cuMemGetAddressRange=lambda address: self.range_of(address))
        self.runtime = SimpleNamespace(
            cudaError_t=SimpleNamespace(cudaSuccess=0),
            cudaIpcMemHandle_t=lambda: SimpleNamespace(getPtr=lambda: ctypes.addressof(HANDLE)),
            cudaIpcMemLazyEnablePeerAccess=1,
            cudaIpcOpenMemHandle=lambda handle, flags: (0, ADDRESS),
            cudaIpcCloseMemHandle=self.closed.append,
        )

    def open(self) -> None:
        module = importlib.import_module("common.kv.cuda_ipc")
        claim = PoolClaim(bytes(64), None, NUM_BYTES, 1, PoolShape(LAYOUT, (NUM_BLOCKS,)))
        module.open_peer(claim, "p", torch.device("cuda:0"))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    cuda = Cuda()
    bindings: Any = ModuleType("cuda.bindings")
    bindings.driver, bindings.runtime = cuda.driver, cuda.runtime
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.delitem(sys.modules, "common.kv.cuda_ipc", raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    yield cuda
    sys.modules.pop("common.kv.cuda_ipc", None)


def no_such_function(address: int) -> tuple[Any, ...]:
    raise RuntimeError('Function "cuMemGetAddressRange_v2" not found')


def test_a_pool_that_is_there_is_opened_also_where_the_driver_cannot_say(cuda: Cuda) -> None:
    cuda.open()
    cuda.range_of = lambda address: (Result.CUDA_SUCCESS, address - 4096, NUM_BYTES + 4096)
    cuda.open()
    cuda.range_of = lambda address: (Result.CUDA_ERROR_NOT_FOUND, None, None)
    cuda.open()
    cuda.range_of = no_such_function
    cuda.open()
    assert not cuda.closed


def test_a_pool_larger_than_what_is_mapped_is_refused_and_unmapped(cuda: Cuda) -> None:
    cuda.range_of = lambda address: (Result.CUDA_SUCCESS, address - 4096, NUM_BYTES + 4095)
    with pytest.raises(TransferFailed, match=f"has {NUM_BLOCKS} blocks.* its memory has {NUM_BYTES - 1}"):
        cuda.open()
    assert cuda.closed == [ADDRESS]
