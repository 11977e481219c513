"""What a killed process has launched ends soon: what it could write is given to others `settle_s` after its end."""

import ctypes
import shutil
import struct
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from common.memory.devices.cuda_backing import CudaBacking, CudaMemory
from deploy.processes.mps import CONTROL
from tests.e2e.mps_daemon import mps
from tests.e2e.programs import executed

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

needs_mps = pytest.mark.skipif(shutil.which(CONTROL) is None, reason=f"needs {CONTROL}")
WATCH_S = 6.0


class Counter:
    """The first four bytes of some memory, read without waiting for anybody's kernels."""

    def __init__(self, backing: CudaBacking) -> None:
        self.runtime = backing.runtime
        memory = backing.allocate(2 << 20)
        assert isinstance(memory, CudaMemory)
        self.memory = memory
        self.memory.fill(0, 2 << 20, 0)
        _, self.stream = self.runtime.cudaStreamCreateWithFlags(self.runtime.cudaStreamNonBlocking)
        _, self.buffer = self.runtime.cudaHostAlloc(4, 0)

    def value(self) -> int:
        kind = self.runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self.runtime.cudaMemcpyAsync(self.buffer, self.memory.address, 4, kind, self.stream)
        (status,) = self.runtime.cudaStreamSynchronize(self.stream)
        assert status == self.runtime.cudaError_t.cudaSuccess, status
        return int(struct.unpack("i", ctypes.string_at(self.buffer, 4))[0])


@pytest.mark.parametrize("is_shared_through_mps", [False, pytest.param(True, marks=needs_mps)])
def test_a_killed_process_writes_no_more_when_it_is_taken_to(is_shared_through_mps: bool, tmp_path: Path) -> None:
    backing = CudaBacking(0)
    counter = Counter(backing)
    daemon = mps(tmp_path) if is_shared_through_mps else nullcontext(executed)
    with daemon as launch, (tmp_path / "writer").open("w+b") as log:
        process = launch("tests.memory.server.endless_writer", [counter.memory.handle.hex()], log)
        end_s = time.monotonic() + 60.0
        while counter.value() < 100_000:
            assert time.monotonic() < end_s and process.poll() is None, (tmp_path / "writer").read_text()
            time.sleep(0.01)
        killed_s = time.monotonic()
        process.kill()
        process.wait(30.0)
        ended_s = written_s = time.monotonic()
        last = counter.value()
        while time.monotonic() < ended_s + WATCH_S:
            if (value := counter.value()) != last:
                last, written_s = value, time.monotonic()
        print(f"ended {ended_s - killed_s:.3f} s after the kill, wrote until {written_s - ended_s:.3f} s after that")
        assert written_s - ended_s < backing.settle_s
    counter.memory.close()
