"""One suite for every transport: bytes equal, mismatches refused, peer death survived, path proven."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.errors import ConfigError, LayoutMismatch, TransferFailed
from common.kv.blocks import BlockAllocator
from common.kv.pool import KVPool
from common.kv.proof import prove_path
from common.kv.transport import TRANSPORTS, PeerPool, Pull, check_compatible, make_transport
from common.wire.frames import decode
from common.wire.handoff_messages import KVPoolExport
from common.wire.kv_layout import KVLayout
from common.wire.pool_shape import PoolShape
from tests.kv.peer_process import BLOCK_BYTES, LAYOUT, random_bytes

ROOT = Path(__file__).parents[2]
NUM_BLOCKS = 40
SHAPE = PoolShape(LAYOUT, (NUM_BLOCKS,))
EPOCH = 77


class PeerProcess:
    """A pool in another process."""

    def __init__(self, transport: str, device: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.kv.peer_process", transport, device, str(EPOCH), str(NUM_BLOCKS)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        export = decode(bytes.fromhex(self.process.stdout.readline()))
        assert isinstance(export, KVPoolExport)
        self.export = export

    def fill(self, seed: int) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(f"fill {seed}", file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "filled\n"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.communicate("exit\n", timeout=60)
        else:
            self.process.communicate()


def devices(transport: str) -> list[tuple[str, str]]:
    """(ours, the peer's) to test: on GPUs the same one, and another where there is one."""
    if TRANSPORTS[transport].device_type == "cpu":
        return [("cpu", "cpu")]
    return [("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")]


CASES = [
    pytest.param(
        (transport, ours, theirs),
        id=f"{transport}-{theirs}-to-{ours}",
        marks=[pytest.mark.gpu] if ours != "cpu" else [],
    )
    for transport in TRANSPORTS
    for ours, theirs in devices(transport)
]


@dataclasses.dataclass
class Meeting:
    """A peer process, and a pool of ours to pull into."""

    peer: PeerProcess
    pool: KVPool
    device: torch.device
    transport: str

    def open(self, export: KVPoolExport | None = None) -> PeerPool:
        return make_transport(self.transport, self.device).open_peer(export or self.peer.export, self.device)


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
def peer(case: Case) -> Iterator[PeerProcess]:
    """One that lives on: a process takes a while to start."""
    yield from lives(case)


def lives(case: Case) -> Iterator[PeerProcess]:
    peer = PeerProcess(case[0], case[2])
    yield peer
    peer.close()


def meet(case: Case, peer: PeerProcess) -> Iterator[Meeting]:
    transport, device = case[0], torch.device(case[1])
    memory = make_transport(transport, device).allocate(NUM_BLOCKS * BLOCK_BYTES, device, f"ours-{os.getpid()}")
    pool = KVPool(SHAPE, memory)
    yield Meeting(peer, pool, device, transport)
    pool.close()


@pytest.fixture
def meeting(case: Case, peer: PeerProcess) -> Iterator[Meeting]:
    yield from meet(case, peer)


@pytest.fixture
def last_meeting(case: Case) -> Iterator[Meeting]:
    """With a peer of its own, which may die."""
    for peer in lives(case):
        yield from meet(case, peer)


def wait(pull: Pull) -> None:
    deadline_s = time.monotonic() + 60
    while not pull.done():
        assert time.monotonic() < deadline_s


def proven(meeting: Meeting, opened: PeerPool, export: KVPoolExport, allocator: BlockAllocator) -> float:
    """GB/s, once the proof is over."""
    proof = prove_path(opened, export, meeting.pool, allocator)
    while True:
        try:
            next(proof)
        except StopIteration as over:
            return float(over.value)


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


def test_the_path_is_proven_and_its_blocks_given_back(meeting: Meeting) -> None:
    opened, allocator = meeting.open(), BlockAllocator(SHAPE)
    assert proven(meeting, opened, meeting.peer.export, allocator) > 0
    allocator.check([])
    held = allocator.allocate(allocator.num_free)[0]
    meeting.pool.blocks[0][held] = 0xAB
    assert proven(meeting, opened, meeting.peer.export, allocator) > 0, "a full pool is no broken path"
    assert bool((meeting.pool.blocks[0][held] == 0xAB).all())
    opened.close()


def test_a_path_that_delivers_other_bytes_is_no_path(meeting: Meeting) -> None:
    opened, allocator = meeting.open(), BlockAllocator(SHAPE)
    lied = dataclasses.replace(meeting.peer.export, pool_id=EPOCH + 1)
    with pytest.raises(TransferFailed, match="other bytes"):
        proven(meeting, opened, lied, allocator)
    allocator.check([])
    opened.close()


def test_blocks_survive_the_death_of_their_owner_until_we_let_go(last_meeting: Meeting) -> None:
    meeting = last_meeting
    meeting.peer.fill(9)
    opened = meeting.open()
    pull = opened.pull([7, 8], meeting.pool, [1, 2])
    meeting.peer.kill()
    wait(pull)
    wait(opened.pull([9], meeting.pool, [3]))
    assert torch.equal(meeting.pool.blocks[0][1:4].cpu(), random_bytes(9, NUM_BLOCKS)[7:10])
    opened.close()


def test_a_dead_peer_cannot_be_opened(last_meeting: Meeting) -> None:
    meeting = last_meeting
    meeting.peer.process.communicate("exit\n", timeout=60)
    with pytest.raises(TransferFailed, match="worker p"):
        meeting.open()


def test_a_handle_that_is_none_is_refused(meeting: Meeting) -> None:
    for handle in (b"", b"../../etc/passwd", b"x" * 63):
        with pytest.raises(TransferFailed):
            meeting.open(dataclasses.replace(meeting.peer.export, handle=handle))


def test_a_pool_larger_than_the_memory_behind_it_is_refused(meeting: Meeting) -> None:
    with pytest.raises(TransferFailed, match="worker p offers 400 blocks, which are 9830400 bytes, its memory has"):
        meeting.open(dataclasses.replace(meeting.peer.export, num_blocks=(10 * NUM_BLOCKS,)))


def test_another_layout_is_refused_and_every_difference_named(meeting: Meeting) -> None:
    check_compatible(meeting.peer.export, meeting.pool, meeting.transport)
    [group] = LAYOUT.groups
    theirs = KVLayout("another", (dataclasses.replace(group, head_dim=64),))
    with pytest.raises(
        LayoutMismatch, match=r"fingerprint: 'model' here, 'another' there; groups\[0\]\.head_dim: 32 here, 64 there"
    ):
        check_compatible(dataclasses.replace(meeting.peer.export, layout=theirs), meeting.pool, meeting.transport)
    with pytest.raises(LayoutMismatch, match="transport"):
        check_compatible(meeting.peer.export, meeting.pool, "pigeon")


def test_a_transport_refuses_the_wrong_kind_of_device() -> None:
    with pytest.raises(ConfigError, match="cuda_ipc moves cuda memory, this worker runs on cpu"):
        make_transport("cuda_ipc", torch.device("cpu"))
    assert make_transport("auto", torch.device("cpu")).name == "shm"
