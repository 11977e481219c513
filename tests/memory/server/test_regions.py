"""Whatever clients do and whenever they die: one fills, the others wait, and nobody maps what is not all there."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.base.errors import MemoryShort
from common.memory.blocks.answers import Answer, ProtocolError
from common.memory.devices.backing import Copies, CopyFailed, HostPiece, SharedPiece
from common.memory.devices.gpu_gauge import GpuUse
from common.memory.server.regions import Regions
from common.wire.messages.memory import RegionState, WeightsFilled, WeightsRegion, WeightsWanted

ROOM = 100


class FakeMemory:
    descriptor, address = None, 0

    def __init__(self, backing: "FakeBacking", num_bytes: int, number: int) -> None:
        self.backing, self.num_bytes, self.handle = backing, num_bytes, str(number).encode()
        self.is_sealed = self.is_closed = False

    def write(self, offset: int, data: bytes | bytearray) -> None:
        raise AssertionError("weights are written by workers")

    def fill(self, offset: int, num_bytes: int, byte: int) -> None:
        raise AssertionError("weights are written by workers")

    def seal(self) -> None:
        assert not self.is_closed
        self.is_sealed = True

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True
        self.backing.room += self.num_bytes


class FakeBacking:
    device, device_uuid = "fake", ""
    settle_s = awake_s = host_pause = 0.0

    def __init__(self) -> None:
        self.room, self.made = ROOM, list[FakeMemory]()

    def free_bytes(self) -> int:
        return self.room

    def use(self) -> GpuUse:
        return GpuUse()

    def host_piece(self, num_bytes: int) -> HostPiece:
        raise MemoryShort("none")

    def shared_piece(self, num_bytes: int) -> SharedPiece:
        raise MemoryShort("none")

    def copies(self) -> Copies:
        raise CopyFailed("none")

    def allocate(self, num_bytes: int) -> FakeMemory:
        if num_bytes > self.room:
            raise MemoryShort(f"{num_bytes} wanted, {self.room} free")
        self.room -= num_bytes
        self.made.append(FakeMemory(self, num_bytes, len(self.made)))
        return self.made[-1]


KEYS = [
    WeightsWanted("model", "layout", 40),
    WeightsWanted("model", "other layout", 40),
    WeightsWanted("large", "layout", 90),
]


class Clients(RuleBasedStateMachine):
    """What each client believes, by what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.backing = FakeBacking()
        self.regions = Regions(self.backing)
        self.believes: dict[int, tuple[WeightsWanted, RegionState, bytes]] = {}
        self.num_clients = 0

    def hear(self, answer: Answer) -> None:
        key, _, handle = self.believes[answer.client]
        if isinstance(answer.message, WeightsFilled):
            self.believes[answer.client] = (key, RegionState.FILLED, handle)
        elif isinstance(answer.message, WeightsRegion):
            assert answer.message.handle == handle, "a region stays where it is"
            self.believes[answer.client] = (key, answer.message.state, handle)

    def of_state(self, state: RegionState) -> list[int]:
        return [client for client, (_, believed, _) in self.believes.items() if believed is state]

    @rule(key=st.sampled_from(KEYS))
    def want(self, key: WeightsWanted) -> None:
        client = self.num_clients = self.num_clients + 1
        try:
            answer = self.regions.want(client, key)
        except MemoryShort:
            used = {each[0] for each in self.believes.values()}
            assert key.num_bytes > ROOM - sum(each.num_bytes for each in used), "there was room but for unused regions"
            return
        assert isinstance(answer.message, WeightsRegion)
        self.believes[client] = (key, answer.message.state, answer.message.handle)

    @precondition(lambda self: self.of_state(RegionState.EMPTY))
    @rule(data=st.data(), num_filled=st.integers(0, 1000))
    def progress(self, data: st.DataObject, num_filled: int) -> None:
        for answer in self.regions.progressed(data.draw(st.sampled_from(self.of_state(RegionState.EMPTY))), num_filled):
            assert self.believes[answer.client][1] is RegionState.FILLING

    @precondition(lambda self: self.of_state(RegionState.EMPTY))
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.of_state(RegionState.EMPTY)))
        for answer in self.regions.filled(client):
            self.hear(answer)
        self.believes[client] = (self.believes[client][0], RegionState.FILLED, self.believes[client][2])

    @precondition(lambda self: self.believes)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(sorted(self.believes)))
        del self.believes[client]
        for answer in self.regions.leave(client):
            self.hear(answer)

    @precondition(lambda self: self.believes)
    @rule(data=st.data())
    def taint(self, data: st.DataObject) -> None:
        """All who map the same are told, and leave one after the other; it is gone with the last."""
        client = data.draw(st.sampled_from(sorted(self.believes)))
        key, _, handle = self.believes[client]
        told = self.regions.taint(client)
        assert told == {other for other, (own, _, _) in self.believes.items() if own == key}
        for other in data.draw(st.permutations(sorted(told))):
            assert not self.backing.made[int(handle)].is_closed
            for answer in self.regions.leave(other):
                self.hear(answer)
            del self.believes[other]
        assert self.backing.made[int(handle)].is_closed and key not in self.regions.regions

    @precondition(lambda self: len(self.believes) > len(self.of_state(RegionState.EMPTY)))
    @rule(data=st.data())
    def lie(self, data: st.DataObject) -> None:
        """Who fills nothing cannot say that it does; nor can anybody want twice."""
        client = data.draw(st.sampled_from(sorted(set(self.believes) - set(self.of_state(RegionState.EMPTY)))))
        with pytest.raises(ProtocolError):
            self.regions.filled(client)
        with pytest.raises(ProtocolError):
            self.regions.progressed(client, 1)
        with pytest.raises(ProtocolError):
            self.regions.want(client, KEYS[0])

    @invariant()
    def all_is_well(self) -> None:
        for key in {each[0] for each in self.believes.values()}:
            states = [state for own, state, _ in self.believes.values() if own == key]
            handles = {handle for own, _, handle in self.believes.values() if own == key}
            assert len(handles) == 1, "all users have the same memory"
            memory = self.backing.made[int(handles.pop())]
            assert not memory.is_closed, "in use"
            if RegionState.FILLED in states:
                assert set(states) == {RegionState.FILLED} and memory.is_sealed
            else:
                assert states.count(RegionState.EMPTY) == 1 and not memory.is_sealed
        assert self.backing.room + sum(each.num_bytes for each in self.backing.made if not each.is_closed) == ROOM


Clients.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestClients = pytest.mark.medium(Clients.TestCase)
