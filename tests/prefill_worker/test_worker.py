"""The loop with a device that is finished when the test says so: what is launched, sent and freed when."""

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import zmq

from common.base.errors import ErrorCode
from common.device.engine.engine import Engine
from common.device.steps.loop_trace import Trace
from common.device.steps.prompt_buffers import PromptChunk
from common.device.steps.prompt_runner import PromptRunner
from common.device.steps.prompt_scores import PromptScores
from common.grammar.followers import make_followers
from common.kernels.base.sampling_operands import NO_CHOICE
from common.serving.turns.forecast import LearnedForecast, Work
from common.serving.turns.law import TurnLaw
from common.serving.turns.page import PAGE_BYTES, TurnPage
from common.serving.turns.prompt_turns import PromptTurns
from common.serving.worker.drain import Drain
from common.settings.config import Config, NetSection, PrefillSection
from common.settings.memory_sections import KVSection
from common.settings.slo_section import SloSection
from common.wire.messages.handoff import KVPathResult, KVPoolExport, KVProgress
from common.wire.messages.memory import KVDeclined, KVOffer, KVReceived
from common.wire.messages.worker import (
    Abort,
    DecodePeer,
    Inquiry,
    InquiryReply,
    Message,
    PeerGone,
    PromptLogprobs,
    RequestFailed,
    Role,
    TokenBatch,
    WorkerReady,
)
from common.wire.messages.worker_id import connection_of
from common.wire.transport.sockets import Hub
from common.wire.values.output_token import OutputToken
from common.wire.values.packing import pack_ids, unpack_ids
from common.wire.values.sampling_params import SamplingParams
from prefill_worker.worker import QUIET_POLLS, PrefillWorker
from tests.support.fakes import free_endpoint
from tests.support.guided import DEMO_MODEL
from tests.support.layouts import allocator_of
from tests.support.lone_pool import LonePool
from tests.support.messages import LAYOUT, prefill_request, worker_ready
from tests.support.scoring import scores_of

TOKEN = 7
VOCAB = 2048  # as the demo model has


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.001)


class Step:
    """A launched step; `over` is set by the test."""

    def __init__(self, chunks: list[PromptChunk], *, whole_gpu: bool) -> None:
        self.chunks = chunks
        self.whole_gpu = whole_gpu
        self.over = False
        self.without_choice: set[int] = set()  # chunks whose logits are all NaN

    def ready(self) -> bool:
        return self.over

    def tokens(self) -> list[OutputToken | None]:
        assert self.over, "the loop waits for the device"
        sampled = [NO_CHOICE if i in self.without_choice else TOKEN for i in range(len(self.chunks))]
        return [
            OutputToken(token) if chunk.is_last else None for token, chunk in zip(sampled, self.chunks, strict=True)
        ]

    def scores(self) -> list[PromptScores | None]:
        assert self.over, "the loop waits for the device"
        return [scores_of(chunk) for chunk in self.chunks]


class Rig:
    """A prefill worker between the sockets of a router and of a decode worker."""

    def __init__(self, num_blocks: int = 32, **section: Any) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = Hub(self.context, NetSection(), free_endpoint())
        self.decode = Hub(self.context, NetSection(), free_endpoint())
        self.steps: list[Step] = []
        self.runner = SimpleNamespace(
            launch=self._launch,
            trace=Trace(),
            missing=list[int](),
            lacked_graphs=False,
            capture_ahead=self._capture,
        )
        self.said: list[Message] = []
        self.announced: list[tuple[str, list[int]]] = []  # request, complete blocks
        self.allocator = allocator_of(num_blocks, 16)
        self.pool = LonePool(self.allocator)
        engine = SimpleNamespace(
            shared=self.pool.shared,
            allocator=self.allocator,
            pool=SimpleNamespace(layout=LAYOUT),
            transport=SimpleNamespace(name="shm"),
            max_len=512,
            vocab_size=VOCAB,
            device=torch.device("cpu"),
        )
        self.worker = PrefillWorker(
            Config(
                net=NetSection(router_endpoint=self.router.endpoint),
                prefill=PrefillSection(**section),
                kv=KVSection(prefix_cache=False),
            ),
            cast(Engine, engine),
            runner=cast(PromptRunner, self.runner),
            ready=worker_ready("p", Role.PREFILL, num_blocks=(num_blocks,), max_model_len=512, max_batch_tokens=64),
            drain=Drain(1.0),
            followers=make_followers(DEMO_MODEL, VOCAB),
        )
        self.turn_until(lambda: any(isinstance(message, WorkerReady) for message in self.said))
        self.tell(DecodePeer("d", 1, self.decode.endpoint))
        self.turn_until(lambda: self.worker.targets.proven("d", 1) is not None)

    def _capture(self) -> None:
        assert not self.worker.steps.in_flight and not self.worker.scheduler.prompts, "a prompt waits for a capture"
        if self.runner.missing:
            self.runner.missing.pop()

    def close(self) -> None:
        self.worker.close()
        self.router.close()
        self.decode.close()
        self.context.term()
        self.pool.close()

    @property
    def handed_off(self) -> list[KVOffer]:
        """What was offered to the decode worker."""
        return self.pool.offered

    def tell(self, message: Message) -> None:
        self.router.send(connection_of("p", 1), message)

    def ask(
        self,
        name: str,
        num_tokens: int,
        *,
        num_prompt_logprobs: int = 0,
        waited_ms: int = 0,
        **sampling: Any,
    ) -> None:
        """Send a prompt; returns when it has arrived."""
        num_known = len(self.worker.scheduler.prompts)
        how = SamplingParams(**sampling)
        fields = {"num_prompt_logprobs": num_prompt_logprobs, "waited_ms": waited_ms}
        self.tell(prefill_request(name, range(num_tokens), sampling=how, turn=num_known, **fields))

        def arrived() -> bool:
            self.worker.inbox.receive()
            return len(self.worker.scheduler.prompts) > num_known

        until(arrived)

    def turn(self) -> None:
        """One turn of the loop and what it made others see."""
        self.worker.turn()
        self.said += [message for _, message in self.router.receive()]
        for identity, message in self.decode.receive():
            if isinstance(message, KVPoolExport):
                self.decode.send(identity, KVPathResult("d", 1, False, ""))
            elif isinstance(message, KVProgress):
                self.announced.append((message.request_id, unpack_ids(message.block_ids)))

    def turn_until(self, condition: Callable[[], bool]) -> None:
        def turned() -> bool:
            self.turn()
            return condition()

        until(turned)

    def turn_until_over(self, name: str) -> None:
        """That prompt, and no other, has its token and is handed over."""
        self.turn_until(lambda: self.with_tokens() == [h.request_id for h in self.handed_off] == [name])

    def offer(self, *names: str) -> None:
        """Compute prompts and hand them off; their decode worker says nothing."""
        num_before = len(self.handed_off)
        for name in names:
            self.ask(name, 10)
        self.turn()
        self.steps[-1].over = True
        self.turn_until(lambda: len(self.handed_off) == num_before + len(names))

    def failed(self) -> list[tuple[str, int, ErrorCode]]:
        """What the router was told of attempts that nothing is left of here."""
        failed = [message for message in self.said if isinstance(message, RequestFailed)]
        return [(message.request_id, message.attempt, message.code) for message in failed]

    def abort(self, name: str) -> None:
        self.tell(Abort(name, 0))
        self.turn_until(lambda: not self.worker.inbox._has((name, 0)))

    def launched(self) -> list[list[int]]:
        """Tokens of each chunk of each step."""
        return [[len(chunk.token_ids) for chunk in step.chunks] for step in self.steps]

    def with_tokens(self) -> list[str]:
        """Requests whose first token the router has."""
        return [name for message in self.said if isinstance(message, TokenBatch) for name in message.request_ids]

    def _launch(self, chunks: list[PromptChunk], *, whole_gpu: bool) -> Step:
        self.steps.append(Step(chunks, whole_gpu=whole_gpu))
        return self.steps[-1]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(max_batch_tokens=64)
    yield rig
    rig.close()


def test_one_step_is_queued_behind_the_running_one_and_no_more(rig: Rig) -> None:
    for name in "abc":
        rig.ask(name, 60)
        rig.turn()
    assert rig.launched() == [[60], [60]]
    rig.steps[0].over = True
    rig.turn_until(lambda: rig.with_tokens() == ["a"])
    assert rig.launched() == [[60], [60], [60]]
    assert rig.worker.link.load.num_running == 2


def test_what_is_told_of_a_prompt_comes_before_its_first_token_and_not_after_an_abort(rig: Rig) -> None:
    rig.ask("long", 100, num_prompt_logprobs=1)
    rig.ask("plain", 20)
    rig.ask("gone", 20, num_prompt_logprobs=1)
    rig.turn_until(lambda: len(rig.steps) == 2)
    rig.abort("gone")
    for step in rig.steps:
        step.over = True

    def is_over() -> bool:
        for step in rig.steps:
            step.over = True
        return sorted(rig.with_tokens()) == ["long", "plain"]

    rig.turn_until(is_over)
    told = [message for message in rig.said if isinstance(message, PromptLogprobs)]
    assert {message.request_id for message in told} == {"long"}
    ids = [token_id for message in told for token_id in unpack_ids(message.logprob_ids)]
    assert ids == [*range(1, 100)] and told[0].first_position == 1
    said = [message for message in rig.said if isinstance(message, PromptLogprobs | TokenBatch)]
    last = max(i for i, message in enumerate(said) if isinstance(message, PromptLogprobs))
    assert any(isinstance(message, TokenBatch) and "long" in message.request_ids for message in said[last:])


def test_chunks_of_one_prompt_follow_each_other_without_waiting(rig: Rig) -> None:
    rig.ask("long", 100)
    rig.turn()
    rig.turn()
    assert [[(c.start, c.end, c.is_last) for c in step.chunks] for step in rig.steps] == [
        [(0, 64, False)],
        [(64, 100, True)],
    ]
    rig.steps[0].over = True
    rig.turn()
    assert not rig.with_tokens()
    rig.steps[1].over = True
    rig.turn_until(lambda: len(rig.handed_off) == 1)
    [handoff] = rig.handed_off
    assert handoff.token_id == TOKEN
    assert unpack_ids(handoff.block_ids) == [*rig.steps[1].chunks[0].tables[0]]


def test_complete_blocks_of_a_prompt_that_goes_on_are_announced(rig: Rig) -> None:
    rig.ask("short", 30)
    rig.ask("long", 120)
    for number in range(3):
        rig.turn()
        rig.steps[number].over = True
    rig.turn_until(lambda: len(rig.handed_off) == len(rig.announced) == 2)
    assert rig.launched() == [[30, 34], [64], [22]]
    block_ids = unpack_ids(rig.handed_off[1].block_ids)
    assert rig.announced == [("long", block_ids[:2]), ("long", block_ids[:6])], "16 tokens a block"


def test_a_prompt_aborted_in_flight_or_ended_by_its_first_token_is_not_announced(rig: Rig) -> None:
    rig.ask("one token", 70, max_tokens=1)
    rig.turn()
    rig.turn()
    rig.ask("aborted", 70)
    rig.steps[0].over = rig.steps[1].over = True
    rig.turn()
    rig.turn()
    rig.abort("aborted")
    for step in rig.steps:
        step.over = True
    rig.turn_until(lambda: rig.with_tokens() == ["one token"])
    rig.turn_until(lambda: not rig.worker.steps.in_flight)
    assert not rig.announced and not rig.handed_off


def test_an_announced_prompt_that_its_first_token_ends_is_called_off(rig: Rig) -> None:
    rig.ask("a", 70, stop_token_ids=(TOKEN,))
    rig.turn()
    rig.turn()
    rig.steps[0].over = rig.steps[1].over = True
    rig.turn_until(lambda: len(rig.announced) == 2)
    assert [(name, len(ids)) for name, ids in rig.announced] == [("a", 4), ("a", 0)]
    assert not rig.handed_off


def take_turns(rig: Rig) -> TurnPage:
    """Let a worker's prompts, 0.1 ms a token, take turns when they would be 50 ms late."""
    page, forecast = TurnPage(bytearray(PAGE_BYTES)), LearnedForecast(Work(0.0))
    forecast.learn([(8192, 0)], 819.2)
    rig.worker.steps.plans = PromptTurns(TurnLaw(SloSection(200.0, 50.0), forecast), forecast, page, writer=3)
    return page


def test_a_late_prompt_that_waits_for_blocks_stops_no_stream() -> None:
    rig = Rig(num_blocks=32, max_batch_tokens=64)
    take_turns(rig).decode(5_000, int((time.monotonic() + 5.0) * 1e6))
    rig.ask("holder", 400)
    rig.turn()
    for name in "abcdefgh":
        rig.ask(name, 300, waited_ms=1000)
    rig.turn()
    assert len(rig.steps) == 2 and not any(step.whole_gpu for step in rig.steps)
    rig.abort("holder")
    rig.steps[0].over = rig.steps[1].over = True
    rig.turn_until(lambda: rig.worker.scheduler.in_turn != [] and len(rig.steps) > 2)
    assert rig.steps[-1].whole_gpu, "with blocks they are late"
    rig.close()


def test_a_late_prompt_gets_the_whole_gpu_in_turns_and_the_router_hears_of_them() -> None:
    rig = Rig(num_blocks=128, max_batch_tokens=64)
    page = take_turns(rig)

    def now_us() -> int:
        return int(time.monotonic() * 1e6)

    def beat() -> tuple[int, bool]:
        rig.worker.report_load()
        told = rig.worker.link._heartbeat()
        return told.num_turns, told.in_turns

    page.decode(5_000, now_us() + 5_000_000)
    rig.ask("in time", 60)
    rig.turn()
    assert ([step.whole_gpu for step in rig.steps], page.turn(now_us()), beat()) == ([False], 0, (0, False))
    rig.steps[0].over = True
    rig.turn_until(lambda: rig.with_tokens() == ["in time"])
    for name in "abcdefghij":
        rig.ask(name, 60, waited_ms=100)
    rig.turn()
    assert rig.steps[1].whole_gpu and page.turn(now_us()) > 0 and beat() == (1, True)

    def are_over() -> bool:
        for step in rig.steps:
            step.over = True
        return len(rig.with_tokens()) == 11

    rig.turn_until(are_over)
    assert beat()[1] is False and page.turn(now_us()) == 0, "streams go on"
    rig.close()


def test_a_prompt_overtaken_between_its_pieces_is_announced_and_handed_off_as_ever(rig: Rig) -> None:
    rig.ask("long", 150)
    rig.turn()
    rig.ask("short", 20)
    for number in range(3):
        rig.turn()
        rig.steps[number].over = True
    rig.turn_until(lambda: len(rig.handed_off) == len(rig.announced) == 2)
    assert [offer.request_id for offer in rig.handed_off] == ["short", "long"]
    assert rig.launched() == [[64], [20, 44], [42]]
    block_ids = unpack_ids(rig.handed_off[1].block_ids)
    assert rig.announced == [("long", block_ids[:4]), ("long", block_ids[:6])], "64 and 108 tokens are complete"


def test_blocks_are_handed_off_only_when_their_step_is_over(rig: Rig) -> None:
    rig.ask("a", 10)
    rig.turn()
    rig.ask("b", 10)
    rig.turn()
    rig.steps[0].over = True
    rig.turn_until(lambda: len(rig.handed_off) == 1)
    assert rig.handed_off[0].request_id == "a"
    assert unpack_ids(rig.handed_off[0].block_ids) == [*rig.steps[0].chunks[0].tables[0]]
    rig.steps[1].over = True
    rig.turn_until(lambda: len(rig.handed_off) == 2)


def test_the_router_learns_of_an_offer_that_its_decode_worker_did_not_receive(rig: Rig) -> None:
    rig.offer("a")
    rig.pool.arriving.append(KVDeclined("a", 0))
    rig.turn_until(lambda: bool(rig.failed()))
    assert rig.failed() == [("a", 0, ErrorCode.HANDOFF_LOST)] and not rig.worker.inbox.owns_something()
    rig.allocator.check([])


def test_the_router_learns_which_requests_are_here(rig: Rig) -> None:
    rig.offer("received", "offered")
    rig.ask("later", 10)
    rig.pool.arriving.append(KVReceived("received", 0))
    rig.turn()
    names = ("received", "offered", "offered", "later", "later", "never came")
    attempts = pack_ids([0, 0, 1, 0, 1, 0])
    rig.tell(Inquiry(names, attempts))
    rig.turn_until(lambda: any(isinstance(message, InquiryReply) for message in rig.said))
    assert InquiryReply("p", 1, names, attempts, bytes([0, 1, 0, 1, 0, 0])) in rig.said
    assert not rig.failed()


def test_who_leaves_waits_until_what_it_offered_is_received(rig: Rig) -> None:
    rig.offer("a")
    assert rig.worker.inbox.owns_something()
    rig.pool.arriving.append(KVReceived("a", 0))
    rig.turn()
    assert not rig.worker.inbox.owns_something() and not rig.failed()


def test_an_offered_request_is_the_routers_again_when_nothing_more_comes_of_it_here(rig: Rig) -> None:
    """The router is told, unless it gave the request up itself."""
    rig.offer("a", "b", "c")
    rig.abort("b")
    assert {*rig.worker.handoffs.offered} == {("a", 0), ("c", 0)}
    rig.worker.inbox.give_everything_back()
    rig.turn_until(lambda: len(rig.failed()) == 2)
    assert rig.failed() == [("a", 0, ErrorCode.DRAINING), ("c", 0, ErrorCode.DRAINING)]
    rig.pool.arriving += [KVReceived("a", 0), KVDeclined("b", 0), KVDeclined("c", 0)]
    rig.turn()
    assert len(rig.failed()) == 2 and not rig.worker.inbox.owns_something()


def test_an_offered_request_is_forgotten_with_its_decode_worker_and_with_the_router(rig: Rig) -> None:
    """The router replays what a dead worker had, and the next router knows nothing of it."""
    rig.offer("a")
    rig.tell(PeerGone("d", 2))
    rig.tell(PeerGone("d", 1))
    rig.turn_until(lambda: rig.worker.targets.proven("d", 1) is None)
    assert not rig.worker.inbox.owns_something()
    rig.tell(DecodePeer("d", 1, rig.decode.endpoint))
    rig.turn_until(lambda: rig.worker.targets.proven("d", 1) is not None)
    rig.offer("b")
    rig.worker.inbox.forget_everything()
    assert not rig.worker.inbox.owns_something()
    rig.pool.arriving += [KVDeclined("a", 0), KVDeclined("b", 0)]
    rig.turn()
    assert not rig.failed()


def test_without_its_memory_server_it_gives_back_what_is_offered_and_offers_nothing_more(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.offer("a")
    rig.ask("b", 10)
    rig.turn()
    rig.steps[-1].over = True
    monkeypatch.setattr(rig.pool, "problem", "lost")
    rig.turn_until(lambda: len(rig.failed()) == 2)
    assert rig.failed() == [("b", 0, ErrorCode.DRAINING), ("a", 0, ErrorCode.DRAINING)]
    assert not rig.worker.inbox.owns_something()


def test_an_attempt_that_is_offered_is_not_computed_again(rig: Rig) -> None:
    rig.offer("a")
    rig.tell(prefill_request("a", range(10)))
    rig.turn_until(lambda: rig.worker.link.spoke.drops.dropped == 1)
    assert not rig.worker.scheduler.prompts


def test_nothing_is_begun_while_much_waits_for_the_memory_server(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.pool, "is_behind", True)
    rig.ask("a", 10)
    for _ in range(3):
        rig.turn()
    assert not rig.steps
    monkeypatch.setattr(rig.pool, "is_behind", False)
    rig.turn()
    assert rig.launched() == [[10]]


def test_nobody_can_say_that_he_lacks_blocks_while_two_steps_are_in_flight(rig: Rig) -> None:
    rig.ask("p", 128)
    rig.turn_until(lambda: len(rig.steps) == 2)
    rig.worker._lease_blocks()
    assert rig.pool.is_busy
    rig.steps[0].over = True
    rig.turn_until(lambda: len(rig.worker.steps.in_flight) == 1)
    rig.worker._lease_blocks()
    assert not rig.pool.is_busy


def test_the_token_of_a_prompt_aborted_in_flight_is_dropped_and_its_blocks_are_free(rig: Rig) -> None:
    rig.ask("a", 30)
    rig.ask("b", 30)
    rig.turn()
    rig.abort("a")
    rig.steps[0].over = True
    rig.turn_until_over("b")
    rig.allocator.check([])


def test_blocks_of_an_aborted_prompt_serve_the_next_one_when_its_steps_are_over() -> None:
    rig = Rig(num_blocks=9, max_batch_tokens=64)
    rig.ask("long", 128)
    rig.turn()
    rig.turn()
    rig.ask("next", 64)
    rig.steps[0].over = True
    rig.turn()
    assert rig.launched() == [[64], [64]], "there is no block left for the next prompt"
    rig.abort("long")
    assert rig.launched() == [[64], [64]], "a step may still write its blocks"
    rig.steps[1].over = True
    rig.turn()
    rig.turn()
    assert rig.launched() == [[64], [64], [64]]
    assert set(rig.steps[2].chunks[0].tables[0]) <= set(rig.steps[1].chunks[0].tables[0])
    rig.steps[2].over = True
    rig.turn_until_over("next")
    rig.allocator.check([])
    rig.close()


def test_a_prompt_that_its_first_token_ends_is_not_handed_off(rig: Rig) -> None:
    rig.ask("a", 10, max_tokens=1)
    rig.turn()
    rig.steps[0].over = True
    rig.turn_until(lambda: rig.with_tokens() == ["a"])
    assert not rig.handed_off
    rig.allocator.check([])


def test_everything_in_flight_is_given_back_when_the_time_to_drain_is_over(rig: Rig) -> None:
    for name in "abc":
        rig.ask(name, 60)
        rig.turn()
    rig.worker.inbox.give_everything_back()
    for step in rig.steps:
        step.over = True
    rig.turn_until(lambda: len([m for m in rig.said if isinstance(m, RequestFailed)]) == 3)
    assert not rig.with_tokens()
    rig.allocator.check([])


def test_a_new_router_is_not_told_what_the_old_one_asked(rig: Rig) -> None:
    rig.ask("a", 60)
    rig.turn()
    rig.worker.inbox.forget_everything()
    rig.ask("b", 60)
    rig.turn()
    for step in rig.steps:
        step.over = True
    rig.turn_until_over("b")
    rig.allocator.check([])


def test_a_prompt_longer_than_this_worker_takes_is_refused_and_the_others_go_on(rig: Rig) -> None:
    rig.tell(prefill_request("long", range(513)))
    rig.ask("a", 10)
    rig.turn()
    rig.steps[0].over = True
    rig.turn_until_over("a")
    [failed] = [message for message in rig.said if isinstance(message, RequestFailed)]
    assert (failed.request_id, failed.code) == ("long", ErrorCode.NEVER_FITS)
    assert "513 tokens" in failed.message and "at most 512" in failed.message


def test_a_prompt_without_a_token_to_choose_fails_and_the_others_go_on(rig: Rig) -> None:
    rig.ask("bad", 70)
    rig.turn()  # 64 tokens of it
    rig.ask("good", 20)
    rig.turn()
    rig.steps[0].over = True
    rig.turn_until(lambda: len(rig.announced) == 1)
    rig.steps[1].without_choice = {0}
    rig.steps[1].over = True
    rig.turn_until(lambda: rig.with_tokens() == [handoff.request_id for handoff in rig.handed_off] == ["good"])
    failed = [(m.request_id, m.code) for m in rig.said if isinstance(m, RequestFailed)]
    assert failed == [("bad", ErrorCode.NO_CHOICE)]
    rig.turn_until(lambda: rig.announced[-1] == ("bad", []))
    assert rig.allocator.num_free == (rig.allocator.capacity[0] - 2,), "the blocks of the other alone are given away"


def test_an_attempt_that_comes_twice_is_served_once_and_a_strange_token_is_given_back(rig: Rig) -> None:
    rig.ask("a", 30)
    again = prefill_request("a", range(30))
    rig.tell(again)
    rig.tell(prefill_request("strange", [1, VOCAB]))
    rig.turn_until(lambda: any(isinstance(message, RequestFailed) for message in rig.said))
    rig.steps[0].over = True
    rig.turn_until_over("a")
    rig.turn_until(lambda: rig.worker.link.spoke.drops.dropped == 1)
    assert rig.launched() == [[30]]
    [failed] = [message for message in rig.said if isinstance(message, RequestFailed)]
    assert (failed.request_id, failed.code) == ("strange", ErrorCode.INTERNAL)
    assert f"token {VOCAB} is not among the {VOCAB}" in failed.message
    rig.allocator.check([])


def test_graphs_that_no_step_lacked_are_captured_after_a_second_without_messages(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefill_worker.worker.IDLE_POLL_MS", 1)
    missing = rig.runner.missing
    missing.extend(range(3))

    def left_after_waits(count: int) -> list[int]:
        left = []
        for _ in range(count):
            rig.worker._await_work()
            left.append(len(missing))
        return left

    rig.turn_until(lambda: not rig.worker.poller.poll(0))
    rig.worker.idling.num_vain = 0
    assert left_after_waits(QUIET_POLLS) == [3] * (QUIET_POLLS - 1) + [2]
    rig.tell(prefill_request("a", range(10)))
    until(lambda: bool(rig.worker.poller.poll(0)))
    assert left_after_waits(QUIET_POLLS) == [2] * QUIET_POLLS, "a message ends the quiet"


def test_graphs_that_steps_lacked_are_captured_as_soon_as_a_worker_is_idle(rig: Rig) -> None:
    missing, rig.runner.lacked_graphs = rig.runner.missing, True
    missing.extend(range(5))
    rig.turn_until(lambda: not rig.worker.poller.poll(0))

    def wait() -> int:
        rig.worker._await_work()
        return len(missing)

    assert [wait(), wait()] == [4, 3], "one at a time"
    rig.tell(prefill_request("a", range(10)))
    until(lambda: bool(rig.worker.poller.poll(0)))
    assert [wait(), wait()] == [3, 3], "a message is read before the next capture"
    rig.turn()
    assert rig.launched() == [[10]]
    wait()
    rig.steps[0].over = True
    wait()
    rig.turn_until_over("a")
    assert len(missing) == 3
    rig.turn_until(lambda: not rig.worker.poller.poll(0))
    assert [wait(), wait(), wait(), wait()] == [2, 1, 0, 0], "soon after a prompt, too"


def test_no_graph_is_captured_while_a_prompt_waits_for_blocks(rig: Rig) -> None:
    held = rig.allocator.allocate(rig.allocator.capacity)
    rig.runner.missing.append(1)
    rig.runner.lacked_graphs = True
    rig.ask("a", 30)
    rig.turn()
    assert held and not rig.steps
    for _ in range(3):
        rig.worker._await_work()
    assert rig.runner.missing == [1]
