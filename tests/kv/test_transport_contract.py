"""One suite for every transport: bytes equal, mismatches refused, peer death survived, path proven."""

import dataclasses
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec import structs

from benchmarks.pulls import answered
from common.base.errors import ConfigError, LayoutMismatch, TransferFailed
from common.kv import proof as proof_module
from common.kv.pool import KVPool
from common.kv.proof import prove_path
from common.kv.transport import NIXL, TRANSPORTS, PeerPool, Pull, check_compatible, make_transport
from common.memory.base.slots import Slots
from common.memory.client.client import PoolClaim
from common.memory.client.gate_connection import Gate
from common.memory.client.peer_pool_client import LentClaim, PeerPoolClient
from common.wire.values.kv_layout import KVLayout
from common.wire.values.pool_shape import PoolShape
from tests.kv.peer_process import BLOCK_BYTES, LAYOUT, random_bytes
from tests.support.allocator import BlockAllocator, no_linger
from tests.support.messages import pool_export
from tests.support.nixl import gate_flags, gate_of, has_nixl

ROOT = Path(__file__).parents[2]
NUM_BLOCKS = 40
SHAPE = PoolShape(LAYOUT, (NUM_BLOCKS,))


STAGED = "nixl staged"
"""NIXL through staging, which a GPU has and a CPU may have."""
SLOTS = Slots(2, 5 * BLOCK_BYTES)
"""Fewer and smaller than a pull."""


class Peer:
    """A memory server, and a prefill worker that writes into its pool.

    is_distant: visited through the server's gate, as from another host.
    slots: staging to read the pool through.
    """

    def __init__(self, device: str, *, is_distant: bool, slots: Slots | None) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="baton-")
        self.socket = Path(self.directory.name) / "memory.sock"
        flags = gate_flags(Path(self.directory.name)) if is_distant else []
        net = ("--net-router-endpoint", f"ipc://{self.directory.name}/router", *flags)
        self.server = self._started("common.memory", "--memory-device", device, "--memory-socket", self.socket, *net)
        self.writer = self._started("tests.kv.peer_process", self.socket, device, NUM_BLOCKS)
        assert self.writer.stdout is not None
        self.pool_id = int(self.writer.stdout.readline())
        self.place: Path | Gate = self.socket
        if is_distant:
            self.place = dataclasses.replace(gate_of(self.socket, Path(self.directory.name)), slots=slots)
        self.clients: list[PeerPoolClient] = []

    def visit(self) -> PoolClaim:
        """As another decode worker."""
        self.clients.append(PeerPoolClient(self.place, ("d", len(self.clients)), self.pool_id, LAYOUT))
        return answered(self.clients[-1])

    def fill(self, seed: int) -> None:
        assert self.writer.stdin is not None and self.writer.stdout is not None
        print(f"fill {seed}", file=self.writer.stdin, flush=True)
        assert self.writer.stdout.readline() == "filled\n"

    def kill(self) -> None:
        for process in (self.server, self.writer):
            process.kill()
            process.wait(60)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for process in (self.writer, self.server):
            process.terminate()
            process.communicate()
        self.directory.cleanup()

    def _started(self, module: str, *args: object) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", module, *map(str, args)]
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def devices(transport: str) -> list[tuple[str, str]]:
    """(ours, the peer's) to test: on GPUs the same one, and another where there is one."""
    gpus = [("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")]
    return {"cuda_ipc": gpus, STAGED: [("cpu", "cpu"), *gpus]}.get(transport, [("cpu", "cpu")])


NEEDS_NIXL = pytest.mark.skipif(not has_nixl(), reason="nixl is not installed")
CASES = [
    pytest.param(
        (transport, ours, theirs),
        id=f"{transport}-{theirs}-to-{ours}",
        marks=[pytest.mark.gpu] * (ours != "cpu") + [NEEDS_NIXL] * transport.startswith(NIXL),
    )
    for transport in (*TRANSPORTS, STAGED)
    for ours, theirs in devices(transport)
]


@dataclasses.dataclass
class Meeting:
    """A peer, and a pool of ours to pull into."""

    peer: Peer
    pool: KVPool
    device: torch.device
    transport: str

    def open(self, claim: PoolClaim | None = None) -> PeerPool:
        claim = claim or self.peer.visit()
        opened = make_transport(self.transport, self.device).open_peer(claim, "p", self.device)
        deadline_s = time.monotonic() + 60
        while not opened.is_open(self.pool):
            assert time.monotonic() < deadline_s
        return opened


Case = tuple[str, str, str]


@pytest.fixture(params=CASES, scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    """Transport, our device, theirs."""
    theirs: str = request.param[2]
    if theirs.startswith("cuda") and int(theirs[-1]) >= torch.cuda.device_count():
        pytest.skip(f"no {theirs} here")
    of_param: Case = request.param
    return of_param


@pytest.fixture(scope="module")
def peer(case: Case) -> Iterator[Peer]:
    """One that lives on: a process takes a while to start."""
    yield from lives(case)


def lives(case: Case) -> Iterator[Peer]:
    peer = Peer(case[2], is_distant=case[0].startswith(NIXL), slots=SLOTS if case[0] == STAGED else None)
    yield peer
    peer.close()


def meet(case: Case, peer: Peer) -> Meeting:
    transport, device = case[0].split()[0], torch.device(case[1])
    memory = torch.empty(SHAPE.num_bytes, dtype=torch.uint8, device=device)
    return Meeting(peer, KVPool(SHAPE, memory), device, transport)


@pytest.fixture
def meeting(case: Case, peer: Peer) -> Meeting:
    return meet(case, peer)


@pytest.fixture
def last_meeting(case: Case) -> Iterator[Meeting]:
    """With a peer of its own, which may die."""
    for peer in lives(case):
        yield meet(case, peer)


def wait(pull: Pull) -> None:
    deadline_s = time.monotonic() + 60
    while not pull.done():
        assert time.monotonic() < deadline_s


def proven(meeting: Meeting, opened: PeerPool, pool_id: int, allocator: BlockAllocator) -> float:
    """GB/s, once the proof is over."""
    proof = prove_path(opened, pool_id, meeting.pool, allocator, no_linger)
    while True:
        try:
            next(proof)
        except StopIteration as over:
            return float(over.value)


@pytest.mark.medium
def test_blocks_arrive_byte_for_byte_and_no_other_is_touched(meeting: Meeting) -> None:
    opened = meeting.open()
    for seed, sources in ((1, [3, 1, 39, 20]), (2, [5]), (3, list(range(1, 40))), (4, [])):
        meeting.peer.fill(seed)
        meeting.pool.blocks[0].fill_(0xAB)
        targets = [39 - i for i in range(len(sources))]
        wait(opened.pull(sources, meeting.pool, targets))
        expected = torch.full((NUM_BLOCKS, BLOCK_BYTES), 0xAB, dtype=torch.uint8)
        expected[targets] = random_bytes(seed, NUM_BLOCKS)[sources]
        assert torch.equal(meeting.pool.blocks[0].cpu(), expected)
    opened.close()


def test_blocks_that_the_peer_does_not_have_are_refused(meeting: Meeting) -> None:
    opened = meeting.open()
    for source_id in (-1, NUM_BLOCKS):
        with pytest.raises(TransferFailed, match="the peer has 40"):
            opened.pull([3, source_id], meeting.pool, [1, 2])
    opened.close()


@pytest.mark.medium
def test_the_path_is_proven_and_its_blocks_given_back(meeting: Meeting) -> None:
    opened, allocator = meeting.open(), BlockAllocator(SHAPE)
    assert proven(meeting, opened, meeting.peer.pool_id, allocator) > 0
    allocator.check([])
    [held] = allocator.allocate((allocator.num_free[0] - 1,))
    meeting.pool.blocks[0][held] = 0xAB
    assert proven(meeting, opened, meeting.peer.pool_id, allocator) > 0, "one block is enough"
    assert bool((meeting.pool.blocks[0][held] == 0xAB).all())
    opened.close()


def test_a_full_pool_says_so_after_a_while(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof_module, "PROOF_TIMEOUT_S", 0.05)
    opened, allocator = meeting.open(), BlockAllocator(SHAPE)
    allocator.allocate(allocator.num_free)
    with pytest.raises(TransferFailed, match="the pool here is full"):
        proven(meeting, opened, meeting.peer.pool_id, allocator)
    opened.close()


def test_a_path_that_delivers_other_bytes_is_no_path(meeting: Meeting) -> None:
    opened, allocator = meeting.open(), BlockAllocator(SHAPE)
    with pytest.raises(TransferFailed, match="other bytes"):
        proven(meeting, opened, meeting.peer.pool_id + 1, allocator)
    allocator.check([])
    opened.close()


@pytest.mark.medium
def test_blocks_survive_the_death_of_their_owner_until_we_let_go(last_meeting: Meeting) -> None:
    meeting = last_meeting
    meeting.peer.fill(9)
    opened = meeting.open()
    pull = opened.pull([7, 8], meeting.pool, [1, 2])
    meeting.peer.kill()
    if meeting.transport == NIXL:  # the claims may have ended before the pull
        with pytest.raises(TransferFailed, match="pool of worker p"):
            wait(pull)
        return
    wait(pull)
    wait(opened.pull([9], meeting.pool, [3]))
    assert torch.equal(meeting.pool.blocks[0][1:4].cpu(), random_bytes(9, NUM_BLOCKS)[7:10])
    opened.close()


def test_a_handle_that_is_none_is_refused(meeting: Meeting) -> None:
    claim = meeting.peer.visit()
    if isinstance(claim, LentClaim):
        with pytest.raises(TransferFailed, match="worker p"):
            meeting.open(dataclasses.replace(claim, metadata=b"../../etc/passwd"))
        return
    for handle in (b"", b"../../etc/passwd", b"x" * 63):
        with pytest.raises(TransferFailed, match="worker p"):
            meeting.open(dataclasses.replace(claim, handle=handle, descriptor=None))


def test_a_pool_larger_than_the_memory_behind_it_is_refused(meeting: Meeting) -> None:
    claim = meeting.peer.visit()
    if isinstance(claim, LentClaim) and claim.slots is not None:
        with pytest.raises(TransferFailed, match="worker p: staging of 4096 bytes, not 245760"):
            meeting.open(dataclasses.replace(claim, num_lent_bytes=4096))
        return
    larger = dataclasses.replace(claim, shape=PoolShape(LAYOUT, (400,)), num_bytes=400 * BLOCK_BYTES)
    with pytest.raises(TransferFailed, match="worker p has 400 blocks, which are 9830400 bytes, its memory has"):
        meeting.open(larger)


def test_another_layout_is_refused_and_every_difference_named(meeting: Meeting) -> None:
    export = pool_export("p", transport=meeting.transport, layout=LAYOUT)
    check_compatible(export, meeting.pool, meeting.transport)
    [group] = LAYOUT.groups
    theirs = KVLayout("another", (structs.replace(group, head_dim=64),))
    with pytest.raises(
        LayoutMismatch, match=r"fingerprint: 'model' here, 'another' there; groups\[0\]\.head_dim: 32 here, 64 there"
    ):
        check_compatible(structs.replace(export, layout=theirs), meeting.pool, meeting.transport)
    other = structs.replace(export, transport="owl")
    with pytest.raises(LayoutMismatch, match="transport: 'owl' there, 'pigeon' here"):
        check_compatible(other, meeting.pool, "pigeon")
    check_compatible(other, meeting.pool, NIXL)
    check_compatible(structs.replace(export, transport=NIXL), meeting.pool, "pigeon")


def test_a_transport_refuses_the_wrong_kind_of_device() -> None:
    with pytest.raises(ConfigError, match="cuda_ipc moves cuda memory, this worker runs on cpu"):
        make_transport("cuda_ipc", torch.device("cpu"))
    assert make_transport("auto", torch.device("cpu")).name == "shm"
