"""An agent of NIXL: memory that a peer on another host may read, or reads of such memory. Imports no torch.

NIXL's own Python class lets the progress thread poll without a pause, which takes a core. So this module uses the
bindings.
"""

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("nixl_cu13", "nixl_cu12")
POLL_US = 100
"""Pause of the progress thread; an idle agent takes 2 % of a core."""
SETTINGS = {
    "UCX_LOG_FILE": "stderr",  # stdout has another reader
    "UCX_HANDLE_ERRORS": "none",  # signals of faults are Python's
    "UCX_TCP_TX_SEG_SIZE": "256k",  # twice the rate of 8k
    "UCX_TCP_RX_SEG_SIZE": "256k",
}
"""Settings of UCX."""
DEVICES = Path("/sys/class/infiniband")
PCI_DEVICES = Path("/sys/bus/pci/devices")
NVIDIA, DISPLAY = "0x10de", "0x03"
"""Vendor of a PCI device, and how the class of GPUs begins."""


class AgentError(Exception):
    """NIXL is not installed, refused a call, or lost a peer."""


def ucx_transports(choice: str) -> str:
    """Return UCX's transports for a choice; auto means RDMA if the host has such devices, else TCP."""
    if choice != "auto":
        return choice
    return "rc" if DEVICES.is_dir() and any(DEVICES.iterdir()) else "tcp"


def with_copies(transports: str, pci_devices: Path = PCI_DEVICES) -> str:
    """Return transports with `cuda_copy` where the host has NVIDIA's GPUs, because NIXL refuses others there.

    `cuda_copy` copies within a process; it carries nothing between processes.
    """
    names = transports.split(",")
    if "cuda" in names or "cuda_copy" in names or not any(map(_is_gpu, pci_devices.glob("*"))):
        return transports
    return f"{transports},cuda_copy"


def _is_gpu(device: Path) -> bool:
    try:
        return (device / "vendor").read_text().strip() == NVIDIA and (device / "class").read_text().startswith(DISPLAY)
    except OSError:
        return False


def bindings() -> Any:
    """Return NIXL's bindings; raises AgentError."""
    for name, value in SETTINGS.items():
        os.putenv(name, value)  # read by UCX alone
    problem = "not installed"
    for package in PACKAGES:
        try:
            return importlib.import_module(f"{package}._bindings")
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            problem = str(error)
    raise AgentError(f"NIXL: {problem}; pip install nixl on every host") from None


class Agent:
    """An agent for a single peer. No byte moves any more once `destroy` has returned. Raises AgentError.

    Args:
        name: unique for each agent, because peers know agents by name.
        transports: of UCX, which has no others to fall back on.
    """

    def __init__(self, name: str, transports: str) -> None:
        self._nixl = bindings()
        os.putenv("UCX_TLS", with_copies(transports))
        config = self._nixl.nixlAgentConfig()
        config.useProgThread, config.useListenThread = True, False
        config.syncMode, config.pthrDelay, config.lthrDelay = self._nixl.NIXL_THREAD_SYNC_STRICT, POLL_US, 100_000
        with _errors():
            self._agent = self._nixl.nixlAgent(name, config)
            self._backends = [self._agent.createBackend("UCX", {})]

    def register(self, address: int, num_bytes: int) -> None:
        """Register host memory, once and whole."""
        with _errors():
            memory = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(address, num_bytes, 0, "")])
            self._agent.registerMem(memory, self._backends)

    def metadata(self) -> bytes:
        """Return the registered memory and the addresses of this agent, for a peer's `meet`."""
        with _errors():
            return bytes(self._agent.getLocalMD())

    def meet(self, metadata: bytes) -> str:
        """Take a peer's metadata; return the peer's name."""
        with _errors():
            name = self._agent.loadRemoteMD(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def blocks(self, peer: str, address: int, block_bytes: int, count: int) -> int:
        """Prepare a list of `count` adjacent blocks of a peer's memory, or of the own for peer ""; return a handle."""
        rows = np.array([[address, block_bytes, 0, block_bytes, count]], np.uint64)
        with _errors():
            whose = peer or self._nixl.NIXL_INIT_AGENT
            return int(self._agent.prepXferDlist(whose, self._nixl.DRAM_SEG, rows, self._backends))

    def read(self, ours: int, our_ids: Sequence[int], theirs: int, their_ids: Sequence[int]) -> int:
        """Begin to read blocks of a peer; return the handle of the read."""
        our_array, their_array = np.array(our_ids, np.int32), np.array(their_ids, np.int32)
        with _errors():
            handle = self._agent.makeXferReq(
                self._nixl.NIXL_READ, ours, our_array, theirs, their_array, b"", self._backends, False
            )
            self._agent.postXferReq(handle, b"")
        return int(handle)

    def read_range(self, ours: int, peer: str, theirs: int, num_bytes: int) -> int:
        """Begin to read bytes of a peer's memory at address `theirs`, to `ours`; return the handle of the read."""
        sides = [self._nixl.nixlXferDList(self._nixl.DRAM_SEG, [(address, num_bytes, 0)]) for address in (ours, theirs)]
        with _errors():
            handle = self._agent.createXferReq(self._nixl.NIXL_READ, *sides, peer, b"", self._backends)
            self._agent.postXferReq(handle, b"")
        return int(handle)

    def is_read(self, handle: int) -> bool:
        """Tell whether all bytes of a read have arrived; the handle is void afterwards."""
        with _errors():
            if self._agent.getXferStatus(handle) != self._nixl.NIXL_SUCCESS:
                return False
            self._agent.releaseXferReq(handle)
        return True

    def destroy(self) -> None:
        """End all reads under way, here and by the peer; some of their bytes have arrived."""
        self._agent = None


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the errors of NIXL have no base of their own
        raise AgentError(f"NIXL: {type(error).__name__}: {error}") from None
