"""A real server on a real socket: what clients get, and what becomes of those that do not keep to the protocol."""

import errno
import itertools
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.base.errors import ConfigError, KVError, MemoryLost, MemoryShort
from common.device.engine.engine import claimed_pool
from common.memory.base import channel as channel_module
from common.memory.base.channel import Channel
from common.memory.blocks.lease_table import BlockState
from common.memory.client import client as client_module
from common.memory.client import connection as connection_module
from common.memory.client import link as link_module
from common.memory.client.client import MemoryClient, WeightsClaim
from common.memory.client.connection import ASK_S, MAX_UNANSWERED
from common.memory.client.mapping import Mapping
from common.memory.client.shared_pool import PromptMessage, SharedPool
from common.memory.devices.backing import Memory
from common.memory.devices.host_backing import HostBacking
from common.memory.server import allocations as allocations_module
from common.memory.server import listener as listener_module
from common.memory.server import server as server_module
from common.memory.server.report import usage
from common.memory.server.server import MemoryServer
from common.settings.memory_sections import MemorySection
from common.wire.messages.frames import encode
from common.wire.messages.memory import (
    BlocksLeased,
    BlocksWanted,
    KVDeclined,
    KVOffer,
    KVReceived,
    MemoryHello,
    MemoryKnock,
    MemoryTainted,
    OfBlocks,
    PoolWanted,
    RegionState,
    WeightsFilled,
    WeightsProgress,
    WeightsWanted,
)
from common.wire.messages.worker import Message
from common.wire.values.pool_shape import PoolShape
from tests.memory.parties import leases_of
from tests.support.announcing import announcer
from tests.support.layouts import take
from tests.support.messages import LAYOUT
from tests.wire.strategies import aimed_messages, messages

UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
if os.getuid() != 0:
    UNSHARE += ["--user", "--map-current-user"]
SIZE = 3 * mmap.PAGESIZE + 100
DEADLINE_S = 60.0
HELLO = MemoryHello("prefill-0", 1, False)
CPU = torch.device("cpu")


class Backed(HostBacking):
    """A server in a thread; `room` can be taken from it."""

    def __init__(self, path: Path) -> None:
        self.path, self.room = path, True
        self.clients: list[MemoryClient] = []
        self.is_closed = False
        self.announcer = announcer()
        self.server = MemoryServer(path, self, self.announcer, MemorySection(decode_reserve=0.0))
        self.start_turning()

    def allocate(self, num_bytes: int) -> Memory:
        if not self.room:
            raise MemoryShort("nothing is left")
        return super().allocate(num_bytes)

    def start_turning(self) -> None:
        self.server.is_stopped = False
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def stop_turning(self) -> None:
        """It hangs."""
        self.server.stop()
        self.thread.join(DEADLINE_S)

    def stop(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self.stop_turning()
        self.server.close()
        self.announcer.close()

    def _run(self) -> None:
        while not self.server.is_stopped:
            self.server.turn(0.01)

    def connect(self, name: str = "prefill-0") -> MemoryClient:
        """Closed with the fixture."""
        self.clients.append(MemoryClient(self.path, name, 1, is_decoding=name.startswith("decode")))
        return self.clients[-1]


@pytest.fixture
def backed(tmp_path: Path) -> Iterator[Backed]:
    running = Backed(tmp_path / "memory.sock")
    yield running
    for client in running.clients:
        client.close()
    running.stop()


def eventually(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, "not within the deadline"
        time.sleep(0.005)


def claim(client: MemoryClient, num_bytes: int = SIZE) -> WeightsClaim:
    return client.claim_weights("model", "layout", num_bytes)


def test_what_one_fills_the_others_read_and_cannot_write(backed: Backed) -> None:
    first, second = backed.connect(), backed.connect("decode-0")
    mine = claim(first)
    assert mine.state is RegionState.EMPTY
    theirs = claim(second)
    assert theirs.state is RegionState.FILLING
    said: list[tuple[int, int]] = []
    Mapping(mine, CPU).tensor(writable=True).copy_(torch.arange(SIZE) % 251)
    first.report(SIZE // 2)
    first.publish(SIZE)
    assert second.wait_filled(SIZE, lambda done, total: said.append((done, total))) is RegionState.FILLED
    assert said == [(SIZE // 2, SIZE), (SIZE, SIZE)]
    third = claim(backed.connect("decode-1"))
    assert third.state is RegionState.FILLED
    for each in (theirs, third):
        read = Mapping(each, CPU).tensor(writable=False)
        assert torch.equal(read, (torch.arange(SIZE) % 251).to(torch.uint8))
        with pytest.raises(PermissionError):
            Mapping(each, CPU).tensor(writable=True)
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(each.descriptor or 0, 0)


def test_another_fills_what_a_dead_one_began(backed: Backed) -> None:
    first, second, third = backed.connect(), backed.connect("decode-0"), backed.connect("decode-1")
    claim(first)
    waiting = claim(second)
    claim(third)
    first.close()
    assert second.wait_filled(SIZE, lambda done, total: None) is RegionState.EMPTY
    Mapping(waiting, CPU).tensor(writable=True).fill_(7)
    second.publish(SIZE)
    assert third.wait_filled(SIZE, lambda done, total: None) is RegionState.FILLED
    second.close()
    third.close()
    late = claim(backed.connect("late"))
    assert late.state is RegionState.FILLED, "weights outlive who loaded them"
    assert bool((Mapping(late, CPU).tensor(writable=False) == 7).all())


def test_mappings_outlive_their_server_and_its_clients_hear_of_its_end(backed: Backed) -> None:
    client = backed.connect()
    tensor = Mapping(claim(client), CPU).tensor(writable=True)
    tensor.fill_(5)
    client.publish(SIZE)
    waiting = backed.connect("decode-0")
    backed.stop()
    with pytest.raises(MemoryLost, match="closed the connection"):
        client.receive(BlocksLeased)
    assert bool((tensor == 5).all())
    with pytest.raises(MemoryLost, match=r"memory\.sock"):
        waiting.claim_weights("model", "layout", SIZE)


def test_who_wants_more_than_there_is_waits_and_then_hears_why(backed: Backed, monkeypatch: pytest.MonkeyPatch) -> None:
    backed.room = False
    threading.Timer(0.2, lambda: setattr(backed, "room", True)).start()
    assert claim(backed.connect()).state is RegionState.EMPTY, "room was found in time"
    backed.room = False
    monkeypatch.setattr(allocations_module, "PATIENCE_S", 0.1)
    with pytest.raises(ConfigError, match=r"nothing is left, for 0 s; here are weights of model, 0\.00 GB; stop who"):
        backed.connect("decode-0").claim_weights("model", "another layout", SIZE)


def test_who_wants_more_than_the_device_has_hears_so_at_once(backed: Backed) -> None:
    backed.connect("neighbour")
    with pytest.raises(ConfigError, match=r"17592\.19 GB of host memory wanted, .* available; stop who uses that"):
        backed.connect().claim_weights("model", "layout", 1 << 44)


def test_a_second_pool_of_a_device_is_made_if_there_is_room_and_else_refused_with_what_differs(
    backed: Backed, monkeypatch: pytest.MonkeyPatch
) -> None:
    [group] = LAYOUT.groups
    mine, yours = LAYOUT, replace(LAYOUT, groups=(replace(group, block_size=32, dtype="bfloat16"),))
    backed.connect("prefill-0").claim_pool(mine, (9,))
    assert backed.connect("decode-0").claim_pool(yours, (5,)).shape.num_blocks == (5,)
    backed.room = False
    monkeypatch.setattr(allocations_module, "PATIENCE_S", 0.1)
    third = replace(mine, groups=(replace(group, num_layers=2),))
    with pytest.raises(ConfigError, match=r"num_layers: 1 here, 2 there") as refused:
        backed.connect("decode-1").claim_pool(third, (9,))
    assert "give all workers of a model the same [model] and [kv] section" in str(refused.value)
    with pytest.raises(ConfigError, match=r"lower kv\.pool_bytes or kv\.cpu_pool_bytes"):
        backed.connect("decode-2").claim_pool(replace(mine, fingerprint="another"), (9,))
    assert backed.connect("prefill-1").claim_pool(mine, (9,)).shape.num_blocks == (9,), "the others are served as ever"


def test_a_connection_of_another_user_is_refused(backed: Backed, monkeypatch: pytest.MonkeyPatch) -> None:
    neighbour, uid = backed.connect("neighbour"), os.getuid()
    monkeypatch.setattr(listener_module, "os", SimpleNamespace(getuid=lambda: uid + 1))
    with raw(backed) as connection:
        assert is_let_go(connection)
    monkeypatch.undo()
    assert claim(neighbour).num_bytes == SIZE


def test_a_server_of_another_user_gets_nothing(backed: Backed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may write to the directory of a socket may be there first."""
    uid = os.getuid()
    monkeypatch.setattr(connection_module, "os", SimpleNamespace(getuid=lambda: uid + 1))
    with pytest.raises(ConfigError, match="it is another user's memory server"):
        MemoryClient(backed.path, "prefill-0", 1, is_decoding=False)


def test_half_a_frame_holds_up_nobody(backed: Backed) -> None:
    neighbour, frame = backed.connect("neighbour"), framed(WeightsWanted("model", "layout", SIZE))
    with raw(backed, HELLO, frame[:-1]) as connection, raw(backed, (1 << 20).to_bytes(4, "little")):
        assert claim(neighbour).state is RegionState.EMPTY
        say(connection, frame[-1:])
        eventually(lambda: any(len(region.users) == 2 for region in backed.server.regions.regions.values()))


def test_who_sends_without_end_has_its_turn_and_no_more() -> None:
    class Endless:
        """A connection of which there is always more to read."""

        num_read = 0

        def setblocking(self, blocks: bool) -> None: ...

        def recvmsg(self, size: int, *_: int) -> tuple[bytes, list[object], int, None]:
            knocks = knock * (size // len(knock))
            self.num_read += len(knocks)
            return knocks, [], 0, None

    knock, endless = framed(MemoryKnock()), Endless()
    heard = list(Channel(cast(socket.socket, endless)).receive())
    assert endless.num_read <= channel_module.READ_AT_ONCE_BYTES + channel_module.READ_BYTES
    assert len(heard) * len(knock) == endless.num_read


def test_who_hangs_while_others_wait_loses_its_place(backed: Backed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STALL_S", 0.2)
    hung, waiting = backed.connect(), backed.connect("decode-0")
    claim(hung)
    claim(waiting)
    assert waiting.wait_filled(SIZE, lambda done, total: None) is RegionState.EMPTY
    with pytest.raises(MemoryLost):
        for _ in range(100):
            hung.publish(SIZE)
            time.sleep(0.01)
    waiting.publish(SIZE)
    assert claim(backed.connect("late")).state is RegionState.FILLED


def test_nobody_waits_for_a_server_that_says_nothing_for_ever(backed: Backed, monkeypatch: pytest.MonkeyPatch) -> None:
    filler, waiting = backed.connect(), backed.connect("decode-0")
    claim(filler)
    claim(waiting)
    monkeypatch.setattr(client_module, "STALL_S", 0.1)
    with pytest.raises(MemoryLost, match="not a word"):
        waiting.wait_filled(SIZE, lambda done, total: None)


def test_a_worker_without_a_server_says_which_socket_it_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "CONNECT_S", 0.1)
    with pytest.raises(ConfigError, match=r"worker\.memory_socket = .*nobody\.sock"):
        MemoryClient(tmp_path / "nobody.sock", "prefill-0", 1, is_decoding=False)


def test_a_socket_without_a_directory_says_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"memory\.socket = .*/none/s: No such file.*; name a path in a directory"):
        listener_module.Listener(tmp_path / "none" / "s")


def test_another_users_server_is_no_reason_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(ConfigError, match="another user's memory server"):
        MemoryClient(tmp_path / "theirs.sock", "prefill-0", 1, is_decoding=False)


def test_a_socket_in_use_is_left_alone_and_an_abandoned_one_is_replaced(backed: Backed, tmp_path: Path) -> None:
    with closing(announcer()) as unheard, pytest.raises(ConfigError, match="is another memory server"):
        MemoryServer(backed.path, HostBacking(), unheard, MemorySection())
    abandoned = tmp_path / "abandoned.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(abandoned))
    with closing(announcer()) as unheard, closing(MemoryServer(abandoned, HostBacking(), unheard, MemorySection())):
        assert abandoned.stat().st_mode & 0o777 == 0o600


@contextmanager
def holder(backed: Backed, launcher: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """A worker that has leased 3 blocks of 8."""
    command = [*launcher, sys.executable, "-m", "tests.memory.server.holder_process", str(backed.path), "9", "3"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        pid = 1 if launcher else process.pid
        assert process.stdout is not None and process.stdout.readline() == f"leased by {pid}\n"
        yield process
        process.kill()


@pytest.mark.medium
@pytest.mark.parametrize("launcher", [[], UNSHARE], ids=["this namespace", "another"])
def test_blocks_of_who_hung_up_are_nobodys_until_its_process_is_over(
    backed: Backed, launcher: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if launcher and subprocess.run([*launcher, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may not make a PID namespace")
    caplog.set_level("INFO")
    monkeypatch.setattr(server_module, "LINGER_S", 0.0)
    neighbour = backed.connect("prefill-0")
    assert neighbour.claim_pool(LAYOUT, (9,)).shape.num_blocks == (9,)
    [pool] = backed.server.pools.pools.values()
    with holder(backed, launcher) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "closed\n"
        late = backed.connect("prefill-1")
        assert late.claim_pool(LAYOUT, (100,)).shape.num_blocks == (9,), "it is as large as who came first wanted it"
        eventually(lambda: "its process lives on" in caplog.text)
        assert pool.index.num_quarantined.total() == 3 and usage(backed.server.pools)[:2] == (8, 5)
    eventually(lambda: usage(backed.server.pools) == (8, 8, 0, 0))
    said = [record.getMessage() for record in caplog.records]
    told = [text.removeprefix("decode-0.1: ") for text in said if text.startswith("decode-0.1: ")]
    assert told == [
        "it closed the connection; its 3 KV blocks are kept until its process is over",
        "its process lives on 0 s after its connection ended, and nobody gets its 3 KV blocks until it is over: end it",
        "its process is over, and its 3 KV blocks are free",
    ]
    assert any("the pool of 9 KV blocks" in text and text.endswith("it would have made one of 100") for text in said)


def test_a_worker_that_may_not_name_its_process_says_what_to_do(
    backed: Backed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", forbidden)
    with pytest.raises(ConfigError, match=r"pidfd_open: Operation not permitted; .*seccomp"):
        MemoryClient(backed.path, "prefill-0", 1, is_decoding=False)


@pytest.mark.medium
def test_who_hangs_with_blocks_that_others_wait_for_is_ended(backed: Backed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HUNG_S", 0.3)
    pool = shared_pool(backed, "prefill-0")

    def has_all() -> bool:
        pool.receive()
        pool.update((0,), (0,))
        return pool.leases.fetch((8,))

    with holder(backed) as process:
        process.send_signal(signal.SIGSTOP)
        eventually(has_all)
        assert process.wait(DEADLINE_S) == -signal.SIGKILL


@pytest.mark.medium
def test_who_hangs_in_a_pid_namespace_out_of_reach_is_named_and_keeps_what_it_may_still_write(
    backed: Backed, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_reach(pidfd: int, number: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))  # as the kernel answers a sibling of that namespace

    monkeypatch.setattr(signal, "pidfd_send_signal", out_of_reach)
    monkeypatch.setattr(server_module, "HUNG_S", 0.3)
    client = backed.connect("prefill-0")
    client.claim_pool(LAYOUT, (9,))
    with holder(backed):
        client.send(BlocksWanted((8,)))
        eventually(lambda: "cannot be killed from here (Invalid argument): restart it" in caplog.text)
        assert usage(backed.server.pools)[:2] == (8, 5)
    eventually(lambda: usage(backed.server.pools)[1] == 0)


def test_who_hangs_in_nobodys_way_is_left_alone(backed: Backed) -> None:
    pools, client = backed.server.pools, backed.connect("prefill-0")
    client.claim_pool(LAYOUT, (9,))
    with holder(backed):
        [number] = [each.number for each in backed.server.clients.values() if each.worker == ("decode-0", 1)]
        assert not pools.holds_up_others(number)
        client.send(BlocksWanted((7,)))
        eventually(lambda: pools.holds_up_others(number))
        assert not pools.holds_up_others(number + 7)


@pytest.mark.medium
def test_who_is_killed_again_and_again_takes_nothing_along(backed: Backed) -> None:
    neighbour = backed.connect("prefill-0")
    neighbour.claim_pool(LAYOUT, (9,))
    for _ in range(4):
        with holder(backed):
            assert usage(backed.server.pools)[:2] == (8, 5)
        eventually(lambda: usage(backed.server.pools) == (8, 8, 0, 0))
    processes = backed.server.processes
    eventually(lambda: not processes._leaving and len(processes._pidfds) == 1)


def shared_pool(backed: Backed, name: str, clock: Callable[[], float] = time.monotonic) -> SharedPool:
    client = backed.connect(name)
    return SharedPool(client, client.claim_pool(LAYOUT, (9,)), clock=clock)


def heard_by(pool: SharedPool, count: int) -> list[PromptMessage]:
    """Wait for so many messages."""
    heard: list[PromptMessage] = []

    def have_arrived() -> bool:
        heard.extend(pool.receive())
        return len(heard) >= count

    eventually(have_arrived)
    return heard


def test_word_of_weights_waits_for_who_waits_for_them(backed: Backed) -> None:
    first, second = backed.connect(), backed.connect("decode-0")
    claim(first)
    assert claim(second).state is RegionState.FILLING
    first.publish(SIZE)
    _, shared = claimed_pool(second, PoolShape(LAYOUT, (9,)), CPU)
    assert shared.leases.num_free >= (1,), "a worker needs one to start"
    assert second.wait_filled(SIZE, lambda done, total: None) is RegionState.FILLED


def test_a_prompt_changes_hands_and_who_gave_it_hears_when_it_was_received(backed: Backed) -> None:
    giver, taker = shared_pool(backed, "prefill-0"), shared_pool(backed, "decode-0")
    giver.update((2,), (0,))
    eventually(lambda: bool(giver.receive() or giver.leases.fetch((2,))))
    block_ids = take(giver.leases, 2)
    assert giver.offer(("decode-0", 1), ("r", 3), 7, block_ids)
    [offer] = heard_by(taker, 1)
    assert isinstance(offer, KVOffer) and offer.token_id == 7
    taker.receive_offer(offer)
    taker.update((0,), (0,))
    assert heard_by(giver, 1) == [KVReceived("r", 3)]
    taker.accept(offer)
    assert leases_of(taker.leases).keys() >= set(block_ids)
    taker.leases.free(block_ids)
    taker.update((0,), (0,))
    eventually(lambda: usage(backed.server.pools) == (8, 6, 0, 0))
    with pytest.raises(KVError, match="not in use here"):
        giver.leases.free(block_ids)
    assert not giver.receive(), "it hears of each offer once"


@pytest.mark.parametrize("answer", ["accepted", "declined", "void"])
def test_who_gave_a_prompt_hears_what_became_of_an_offer_that_was_not_received_first(
    backed: Backed, answer: str
) -> None:
    giver, taker = shared_pool(backed, "prefill-0"), shared_pool(backed, "decode-0")
    giver.update((2,), (0,))
    eventually(lambda: bool(giver.receive() or giver.leases.fetch((2,))))
    giver.offer(("decode-0", 1), ("r", 3), 7, take(giver.leases, 2))
    [offer] = heard_by(taker, 1)
    assert isinstance(offer, KVOffer)
    match answer:
        case "accepted":
            taker.accept(offer)
            taker.update((0,), (0,))
        case "declined":
            taker.decline(offer)
        case "void":
            taker.client.close()
    expected = KVReceived("r", 3) if answer == "accepted" else KVDeclined("r", 3)
    assert heard_by(giver, 1) == [expected]


def test_a_worker_is_behind_while_its_server_reads_nothing(backed: Backed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MANY_UNSENT_BYTES", 1000)
    pool = shared_pool(backed, "prefill-0")
    backed.stop_turning()
    while not pool.is_behind:
        pool.client.send(MemoryKnock())
    assert not pool.problem
    backed.start_turning()
    eventually(lambda: not (pool.receive() or pool.is_behind))


def test_an_answer_tells_who_waits_whether_others_get_on(backed: Backed) -> None:
    """A prompt's chunks are sealed and it changes hands; what is merely asked for and given back is nothing done."""
    now_s = 0.0
    giver = shared_pool(backed, "prefill-0")
    waiting = shared_pool(backed, "decode-0", clock=lambda: now_s)

    def told() -> int:
        nonlocal now_s
        now_s += ASK_S + 0.1
        waiting.num_done = -1
        waiting.update((0,), (0,))
        eventually(lambda: bool(waiting.receive()) or waiting.num_done >= 0)
        return waiting.num_done

    giver.update((2,), (0,))
    eventually(lambda: bool(giver.receive() or giver.leases.fetch((2,))))
    first, second, third = take(giver.leases, 3)
    giver.leases.free([third])
    giver.update((0,), (0,))
    assert told() == 0
    giver.leases.seal([first], [bytes(32)])
    eventually(lambda: told() == 1)
    giver.offer(("decode-0", 1), ("r", 0), 7, [first, second])
    eventually(lambda: told() == 2)


def test_what_a_dead_worker_said_last_is_heeded_although_it_read_nothing(backed: Backed) -> None:
    giver, taker = shared_pool(backed, "prefill-0"), shared_pool(backed, "decode-0")
    giver.update((2,), (0,))
    eventually(lambda: bool(giver.receive() or giver.leases.fetch((2,))))
    [client] = [each for each in backed.server.clients.values() if each.worker == ("prefill-0", 1)]
    while not client.channel.unsent:  # the server has answers that it cannot send
        giver.client.send(MemoryKnock())
    giver.offer(("decode-0", 1), ("r", 0), 7, take(giver.leases, 1))
    while giver.is_sending:
        giver.client.connection.channel.flush()
    giver.client.close()
    assert [(offer.request_id, offer.attempt) for offer in heard_by(taker, 1)] == [("r", 0)]


def test_who_reads_nothing_of_too_much_is_let_go(backed: Backed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_UNSENT_BYTES", 1000)
    client, neighbour = backed.connect(), backed.connect("decode-0")
    client.claim_pool(LAYOUT, (9,))
    with pytest.raises(MemoryLost):
        for _ in range(1_000_000):
            client.send(MemoryKnock())
    assert neighbour.claim_pool(LAYOUT, (9,)).shape.num_blocks == (9,)


def test_who_leaves_in_order_gives_back_what_it_has_at_hand_and_wants_nothing_more(
    backed: Backed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    pool, other = shared_pool(backed, "prefill-0"), shared_pool(backed, "prefill-1")
    for each, level in ((pool, 2), (other, 1)):
        each.update((level,), (0,))
        eventually(lambda each=each, level=level: bool(each.receive() or each.leases.num_free >= (2 * level,)))  # type: ignore[misc]
    pool.leases.fetch((8,))  # of which the other has two, so that it waits
    pool.update((2,), (0,))
    pool.leave()
    pool.client.close()
    eventually(lambda: len(backed.server.clients) == 1)
    assert usage(backed.server.pools)[:2] == (8, 6) and "are kept" not in caplog.text
    pool.leave()


def test_what_is_given_to_who_has_said_that_it_leaves_comes_back_at_once(backed: Backed) -> None:
    """Blocks that it waited for, and a prompt; it hears of neither, and its process lives."""
    giver, leaver = shared_pool(backed, "prefill-0"), shared_pool(backed, "decode-0")
    giver.update((3,), (0,))
    eventually(lambda: bool(giver.receive() or giver.leases.num_free >= (6,)))
    leaver.leases.fetch((3,))
    leaver.update((0,), (0,))
    eventually(lambda: bool(backed.server.pools.pools[LAYOUT].wants))
    giver.offer(("decode-0", 1), ("r", 0), 7, take(giver.leases, 1))

    def has_made_way() -> bool:
        giver.receive()
        giver.update((0,), (0,))
        return usage(backed.server.pools) == (8, 4, 1, 0)

    eventually(has_made_way)
    leaver.leave()
    eventually(lambda: usage(backed.server.pools) == (8, 8, 0, 0))
    giver.offer(("decode-0", 1), ("s", 0), 7, [])
    eventually(lambda: KVDeclined("s", 0) in giver.receive())
    leaver.client.close()
    eventually(lambda: len(backed.server.clients) == 1)
    assert usage(backed.server.pools) == (8, 8, 0, 0) and not backed.server.ended


def test_who_leaves_keeps_what_a_launched_step_may_still_write(backed: Backed) -> None:
    pool = shared_pool(backed, "prefill-0")
    pool.update((2,), (0,))
    eventually(lambda: bool(pool.receive() or pool.leases.num_free >= (4,)))
    take(pool.leases, 1)
    pool.leave()
    eventually(lambda: usage(backed.server.pools) == (8, 7, 0, 0))
    pool.client.close()
    eventually(lambda: usage(backed.server.pools) == (8, 7, 0, 1))


def test_an_offer_to_nobody_comes_back_and_its_blocks_are_free(backed: Backed) -> None:
    giver = shared_pool(backed, "prefill-0")
    giver.update((2,), (0,))
    eventually(lambda: bool(giver.receive() or giver.leases.fetch((2,))))
    giver.offer(("decode-7", 1), ("r", 3), 7, take(giver.leases, 2))
    assert heard_by(giver, 1) == [KVDeclined("r", 3)]


def test_a_server_that_hangs_is_told_from_one_that_has_nothing_to_say(backed: Backed) -> None:
    now_s = 0.0
    pool = shared_pool(backed, "prefill-0", lambda: now_s)
    for _ in range(3 * MAX_UNANSWERED):
        pool.update((0,), (0,))
        now_s += 2 * ASK_S
        eventually(lambda: bool(pool.receive() or pool._num_unanswered == 0))
    assert not pool.take_problem()
    backed.stop_turning()
    for _ in range(MAX_UNANSWERED + 1):
        pool.receive()
        assert not pool.take_problem()
        now_s += 2 * ASK_S
        pool.update((0,), (0,))
    assert "not a word for 2" in pool.take_problem()
    assert not pool.take_problem(), "it is told once"
    assert pool.leases.is_exhausted() and not pool.offer(("decode-0", 1), ("r", 0), 7, [])


def test_a_pool_that_is_not_the_one_it_is_said_to_be_is_not_used(backed: Backed) -> None:
    pool, _ = claimed_pool(backed.connect(), PoolShape(LAYOUT, (9,)), CPU)
    assert pool.shape.num_blocks == (9,)
    pool.block(0).fill_(0)
    with pytest.raises(ConfigError, match="its proof blocks have other bytes"):
        claimed_pool(backed.connect("decode-0"), PoolShape(LAYOUT, (9,)), CPU)


def test_who_greets_without_its_process_or_twice_is_let_go(backed: Backed) -> None:
    with raw(backed, framed(HELLO)) as connection:
        assert is_let_go(connection)
    with raw(backed) as connection, open("/dev/null", "rb") as file:
        socket.send_fds(connection, [framed(HELLO)], [file.fileno()])
        assert is_let_go(connection)
    with raw(backed, HELLO, HELLO) as connection:
        assert is_let_go(connection)
    eventually(lambda: not backed.server.clients)
    num_files = len(os.listdir("/proc/self/fd"))
    with raw(backed, HELLO) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):  # it may be let go before all is said
            for _ in range(50):
                socket.send_fds(connection, [framed(BlocksWanted((0,)))[:1]], [0] * 10)
        assert is_let_go(connection)
    eventually(lambda: not backed.server.clients)
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= num_files + 1)


def raw(backed: Backed, *parts: Message | bytes) -> socket.socket:
    """A connection over which that was said."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(DEADLINE_S)
    connection.connect(str(backed.path))
    for part in parts:
        say(connection, part)
    return connection


def say(connection: socket.socket, part: Message | bytes) -> None:
    """A greeting has the descriptor of a process with it."""
    frame = part if isinstance(part, bytes) else framed(part)
    pidfd = os.pidfd_open(os.getpid())
    socket.send_fds(connection, [frame], [pidfd] if isinstance(part, MemoryHello) else [])
    os.close(pidfd)


def framed(message: Message) -> bytes:
    frame = encode(message)
    return struct.pack("<I", len(frame)) + frame


def is_let_go(connection: socket.socket) -> bool:
    """What was answered is read; a reset is an end, too."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        return True
    return True


@pytest.mark.medium
@pytest.mark.parametrize("said", [
    [b"\xff" * 4],
    [framed(HELLO)[:4] + b"\0" * 500],
    [WeightsWanted("model", "layout", SIZE)],
    [HELLO, HELLO],
    [HELLO, WeightsProgress(1)],
    [HELLO, WeightsFilled(1)],
    [HELLO, WeightsWanted("model", "layout", SIZE), WeightsWanted("model", "layout", SIZE)],
])  # fmt: skip
def test_who_breaks_the_rules_loses_its_connection_and_nobody_else_does(
    backed: Backed, said: list[Message | bytes]
) -> None:
    neighbour = backed.connect("neighbour")
    with raw(backed, *said) as connection:
        assert is_let_go(connection)
    assert claim(neighbour).num_bytes == SIZE


def test_who_never_says_who_it_is_is_let_go(backed: Backed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HELLO_S", 0.1)
    with raw(backed) as connection:
        assert is_let_go(connection)
    eventually(lambda: not backed.server.clients)


def test_frames_that_come_byte_by_byte_are_understood(backed: Backed) -> None:
    with raw(backed) as connection:
        say(connection, HELLO)
        for byte in framed(WeightsWanted("model", "layout", SIZE)):
            connection.sendall(bytes([byte]))
        eventually(lambda: any(client.worker for client in backed.server.clients.values()))
        assert connection.recv(4096)


HOSTILE = ("hostile", 1)
numbers = itertools.count()
OF_BLOCKS = get_args(OfBlocks)


@pytest.mark.medium
@settings(max_examples=100)
@given(st.lists(aimed_messages(HOSTILE, [HOSTILE, ("decode-0", 1)], OF_BLOCKS), max_size=6))
def test_nothing_that_is_said_of_blocks_takes_one_from_another(backed: Backed, said: list[Message]) -> None:
    """But for a fault, of which everybody who maps the same has to hear. This process lives, so each has a new pool."""
    layout, neighbour = replace(LAYOUT, fingerprint=f"model {next(numbers)}"), backed.connect("neighbour")
    mine = SharedPool(neighbour, neighbour.claim_pool(layout, (9,)))
    mine.update((1,), (0,))
    eventually(lambda: bool(mine.receive() or mine.leases.fetch((1,))))
    with raw(backed, MemoryHello(*HOSTILE, False), PoolWanted(layout, (9,))) as connection, suppress(OSError):
        for part in said:
            if not isinstance(part, MemoryTainted):
                say(connection, part)
    eventually(lambda: all(client.worker != HOSTILE for client in backed.server.clients.values()))
    assert not mine.receive() and not mine.problem
    index = backed.server.pools.pools[layout].index
    [number] = [client.number for client in backed.server.clients.values() if client.worker == ("neighbour", 1)]
    for block_id, generation in leases_of(mine.leases).items():
        assert index.leases.claim(block_id) == (BlockState.LEASED, number)
        assert index.leases.generation[block_id] == generation
    neighbour.close()
    eventually(lambda: not backed.server.clients)


@pytest.mark.medium
@settings(max_examples=100)
@given(st.lists(st.one_of(messages(), st.binary(max_size=30)), max_size=4))
def test_nothing_that_is_said_ends_the_server(backed: Backed, said: list[Message | bytes]) -> None:
    with raw(backed) as connection:
        try:
            for part in [HELLO, *said]:
                say(connection, part)
        except (BrokenPipeError, ConnectionResetError):
            pass
    neighbour = backed.connect("neighbour")
    assert neighbour.claim_weights("neighbour's", "layout", SIZE).num_bytes == SIZE
    neighbour.close()
    assert backed.thread.is_alive()
