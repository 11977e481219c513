"""A piece of device memory that one process makes and another one, in namespaces of its own perhaps, reads.

    python -m tests.containers.shared_piece make WAY SOCKET DEVICE
    python -m tests.containers.shared_piece read WAY SOCKET DEVICE

WAY is `handle`, of CUDA IPC, as Baton has it, or `file`, a descriptor of memory made by cuMemCreate. Either travels
over a unix socket. The reader prints `ok`, or what the driver said.
"""

import array
import socket
import sys
from pathlib import Path
from typing import Any

from cuda.bindings import driver, runtime

from common.memory.base import ipc_handle

NUM_BYTES = 2 << 20
BYTE = 0x5A
WAITS_S = 60.0
FILE_HANDLE = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class Failed(Exception):
    """What the driver said."""


def checked(returned: tuple[Any, ...], what: str) -> Any:
    """The value of a call, if it has one; raises Failed."""
    status, *values = returned
    if int(status):
        raise Failed(f"{what}: {status.name}")
    return values[0] if values else None


def properties(device: int) -> Any:
    """Of memory on a device whose descriptor another process may have."""
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = device
    wanted.requestedHandleTypes = FILE_HANDLE
    return wanted


def mapped(handle: Any, device: int) -> int:
    """The address at which this process has that memory."""
    address = checked(driver.cuMemAddressReserve(NUM_BYTES, 0, 0, 0), "cuMemAddressReserve")
    checked(driver.cuMemMap(address, NUM_BYTES, 0, handle, 0), "cuMemMap")
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    checked(driver.cuMemSetAccess(address, NUM_BYTES, [access], 1), "cuMemSetAccess")
    return int(address)


def made(way: str, device: int) -> tuple[bytes, int | None]:
    """A piece full of one byte: its handle, or a descriptor."""
    answer: tuple[bytes, int | None]
    if way == "handle":
        address = checked(runtime.cudaMalloc(NUM_BYTES), "cudaMalloc")
        handle = checked(runtime.cudaIpcGetMemHandle(address), "cudaIpcGetMemHandle")
        answer = ipc_handle.to_bytes(handle), None
    else:
        memory = checked(driver.cuMemCreate(NUM_BYTES, properties(device), 0), "cuMemCreate")
        address = mapped(memory, device)
        answer = b"file", int(checked(driver.cuMemExportToShareableHandle(memory, FILE_HANDLE, 0), "export"))
    checked(runtime.cudaMemset(address, BYTE, NUM_BYTES), "cudaMemset")
    checked(runtime.cudaDeviceSynchronize(), "cudaDeviceSynchronize")
    return answer


def opened(handle: bytes, descriptor: int | None, device: int) -> int:
    """The address of another process's piece."""
    if descriptor is None:
        flags = runtime.cudaIpcMemLazyEnablePeerAccess
        return int(checked(runtime.cudaIpcOpenMemHandle(ipc_handle.from_bytes(handle), flags), "cudaIpcOpenMemHandle"))
    return mapped(checked(driver.cuMemImportFromShareableHandle(descriptor, FILE_HANDLE), "import"), device)


def make(way: str, path: Path, device: int) -> str:
    """Give it to the first who connects, and keep it until that one hangs up."""
    handle, descriptor = made(way, device)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(WAITS_S)
        listener.bind(f"{path}.new")
        listener.listen()
        Path(f"{path}.new").rename(path)
        peer, _ = listener.accept()
        peer.settimeout(WAITS_S)
        rights = [] if descriptor is None else [array.array("i", [descriptor])]
        peer.sendmsg([handle], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, each) for each in rights])
        peer.recv(1)
    return "made"


def read(way: str, path: Path, device: int) -> str:
    """What is wrong with what came, or `ok`."""
    with socket.socket(socket.AF_UNIX) as maker:
        maker.settimeout(WAITS_S)
        maker.connect(str(path))
        handle, ancillary, _, _ = maker.recvmsg(64, socket.CMSG_SPACE(4))
        descriptors = array.array("i", b"".join(data for _, _, data in ancillary))
        address = opened(handle, descriptors[0] if way == "file" else None, device)
        there = bytearray(NUM_BYTES)
        kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        checked(runtime.cudaMemcpy(there, address, NUM_BYTES, kind), "cudaMemcpy")
    return "ok" if there == bytes([BYTE]) * NUM_BYTES else "other bytes than were written"


def main() -> int:
    """Prints how it went."""
    role, way, path, device = sys.argv[1:]
    try:
        checked(driver.cuInit(0), "cuInit")
        checked(runtime.cudaSetDevice(int(device)), "cudaSetDevice")
        checked(runtime.cudaFree(0), "context")
        print({"make": make, "read": read}[role](way, Path(path), int(device)), flush=True)
    except (Failed, OSError) as error:
        print(error, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
