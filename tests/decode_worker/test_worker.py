"""The loop with a device that is finished when the test says so: who waits for whom."""

import json
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import zmq

from common.base.errors import ErrorCode
from common.device.steps.adjustments import make_grammar_masks
from common.device.steps.loop_trace import Trace
from common.device.steps.output_ring import StepOutput
from common.device.steps.prompt_buffers import PromptChunk
from common.device.steps.prompt_runner import PromptRunner
from common.device.steps.prompt_scores import PromptScores
from common.grammar.followers import make_followers
from common.kernels.base.sampling_operands import NO_CHOICE
from common.serving.turns.decode_gate import TurnGate
from common.serving.turns.page import PAGE_BYTES, TurnPage
from common.serving.worker.drain import Drain
from common.settings.config import Config, DecodeSection, NetSection
from common.settings.memory_sections import KVSection
from common.wire.messages.memory import KVOffer
from common.wire.messages.token_columns import rows_of
from common.wire.messages.worker import (
    Abort,
    FinishReason,
    Heartbeat,
    Inquiry,
    InquiryReply,
    Message,
    RequestFailed,
    Role,
    TokenBatch,
    WorkerReady,
)
from common.wire.messages.worker_id import connection_of
from common.wire.transport.sockets import Hub
from common.wire.values.output_token import Logprobs, OutputToken
from common.wire.values.packing import pack_ids, unpack_ids
from common.wire.values.sampling_params import SamplingParams
from decode_worker.batch.runner import DecodeRunner
from decode_worker.sequences.row_queue import group_of
from decode_worker.worker import DecodeWorker, Runners
from tests.decode_worker.bench import FakePool, met
from tests.support.fakes import free_endpoint
from tests.support.guided import DEMO_MODEL
from tests.support.layouts import allocator_of
from tests.support.lone_pool import LonePool
from tests.support.messages import decode_request, kv_offer, prefill_request, worker_ready
from tests.support.scoring import scores_of
from tests.support.sequences import blocks_of_worker

FIRST, NEXT = 7, 8
LOGPROBS = Logprobs((NEXT, 5), (-0.5, -0.25))
"""The token that ends a prompt, and that of every step."""
VOCAB = 2048  # as the demo model has


DEADLINE_S = 60.0


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.001)


class Chunk:
    """A launched chunk; `over` is set by the test."""

    def __init__(self, chunk: PromptChunk) -> None:
        self.chunk = chunk
        self.token = FIRST
        self.over = False

    def ready(self) -> bool:
        return self.over

    def tokens(self) -> list[OutputToken | None]:
        assert self.over, "the loop waits for the chunk"
        return [OutputToken(self.token) if self.chunk.is_last else None]

    def scores(self) -> list[PromptScores | None]:
        return [scores_of(self.chunk)]


class Step:
    """A launched step, over at once as on a CPU."""

    def __init__(self, rows: list[list[OutputToken]]) -> None:
        self.rows, self.num_run = rows, len(rows)

    def ready(self) -> bool:
        return True

    def output(self) -> StepOutput:
        return StepOutput(self.rows)


class Rig:
    """A decode worker and the socket of a router.

    What one sends the other has before anything else happens: how many turns there are is up to the test alone.
    """

    def __init__(self, num_blocks: int = 32) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = Hub(self.context, NetSection(), free_endpoint())
        self.said: list[Message] = []
        self.steps: list[Step] = []
        self.chunks: list[Chunk] = []
        self.without_choice: set[str] = set()  # requests whose logits are all NaN from now on
        self.num_chosen = 1  # tokens of each row and step
        self.allocator = allocator_of(num_blocks, 16)
        self.pool = LonePool(self.allocator)
        config = Config(
            net=NetSection(router_endpoint=self.router.endpoint),
            decode=DecodeSection(local_chunk_tokens=16),
            kv=KVSection(prefix_cache=False),
        )
        engine = SimpleNamespace(
            shared=self.pool.shared,
            allocator=self.allocator,
            pool=None,
            max_len=512,
            vocab_size=VOCAB,
            device=torch.device("cpu"),
        )
        grammars = make_grammar_masks(16, 8, VOCAB, torch.device("cpu"))
        batch = SimpleNamespace(apply=lambda changes: None, max_len=512, grammars=grammars)
        runner = SimpleNamespace(
            engine=engine,
            trace=Trace(),
            launch=self._launch_step,
            batch=batch,
            shares_prefixes=True,
            spared_bytes=0,
        )
        self.worker = DecodeWorker(
            config,
            Runners(
                cast(DecodeRunner, runner),
                cast(PromptRunner, SimpleNamespace(launch=self._launch_chunk, trace=Trace())),
            ),
            hub=Hub(self.context, NetSection(), free_endpoint()),
            ready=worker_ready("d", Role.DECODE, num_blocks=(num_blocks,), max_model_len=512),
            drain=Drain(1.0),
            followers=make_followers(DEMO_MODEL, VOCAB),
        )
        self.num_sent, link = 1, self.worker.link  # WorkerReady
        send = link.spoke.send

        def counted(message: Message) -> None:
            self.num_sent += 1
            send(message)

        cast(Any, link.spoke).send = counted
        self.hear()
        assert any(isinstance(message, WorkerReady) for message in self.said)

    def close(self) -> None:
        self.worker.close()
        self.router.close()
        self.context.term()
        self.pool.close()

    def ask(self, name: str, num_tokens: int, max_tokens: int = 100) -> None:
        sampling = SamplingParams(max_tokens=max_tokens)
        num_known = len(self.worker.local_prompts)
        self.tell(prefill_request(name, range(num_tokens), sampling=sampling, turn=num_known))
        self.turn_until(lambda: len(self.worker.local_prompts) > num_known)

    def tell(self, message: Message) -> None:
        """From the router; the worker has it, and looks at it in its next turn."""
        assert self.router.send(connection_of("d", 1), message)
        assert self.worker.link.spoke.socket.poll(int(DEADLINE_S * 1000))

    def announce(self, name: str, num_tokens: int, max_tokens: int = 100) -> None:
        """A prefill worker computes the prompt."""
        self.tell(decode_request(name, range(num_tokens), sampling=SamplingParams(max_tokens=max_tokens)))
        self.turn_until(lambda: (name, 0) in self.worker.arrivals.announced)

    def offer(self, offer: KVOffer) -> None:
        """At a memory server where this worker is a peer."""
        self.worker.inbox._add(self.worker.arrivals.announced.offer(offer, self.worker.sources.peers.by_pool[1]))

    def turn(self) -> None:
        self.worker.turn()
        self.hear()

    def hear(self) -> None:
        """All that the worker has said."""
        until(self._has_heard)

    def _has_heard(self) -> bool:
        self.said += [message for _, message in self.router.receive()]
        return sum(not isinstance(message, Heartbeat) for message in self.said) >= self.num_sent

    def turn_until(self, condition: Callable[[], bool]) -> None:
        def turned() -> bool:
            self.turn()
            return condition()

        until(turned)

    def sent(self, name: str) -> list[int]:
        """Tokens of a request that the router has."""
        batches = [message for message in self.said if isinstance(message, TokenBatch)]
        rows = [pair for b in batches for pair in zip(b.request_ids, unpack_ids(b.token_ids), strict=True)]
        return [token for request_id, token in rows if request_id == name]

    def failed(self, name: str) -> list[ErrorCode]:
        """Why the router was told that a request failed."""
        return [m.code for m in self.said if isinstance(m, RequestFailed) and m.request_id == name]

    def _launch_step(self, num_rows: int, **asked: int) -> Step:
        names = [sequence.request.request_id for sequence in self.worker.scheduler.rows.sequences[:num_rows]]
        chosen = [OutputToken(NEXT, LOGPROBS)] * self.num_chosen
        self.steps.append(Step([[OutputToken(NO_CHOICE)] if name in self.without_choice else chosen for name in names]))
        return self.steps[-1]

    def _launch_chunk(self, chunks: list[PromptChunk], *, whole_gpu: bool = True) -> Chunk:
        assert not self.worker.steps.in_flight and not self.worker.outputs.columns, "a token waits for the chunk"
        self.chunks.append(Chunk(*chunks))
        return self.chunks[-1]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def begin(rig: Rig, name: str) -> None:
    """A stream whose short prompt was computed here."""
    rig.ask(name, 10)
    rig.chunks[-1].over = True
    rig.turn_until(lambda: len(rig.sent(name)) > 2)


def finish_chunk(rig: Rig) -> None:
    """The chunk in flight is over, and the next one follows."""
    num_launched = len(rig.chunks)
    rig.chunks[-1].over = True
    rig.turn_until(lambda: len(rig.chunks) > num_launched)


def test_a_step_may_yield_several_tokens_of_a_row_and_none_beyond_its_end(rig: Rig) -> None:
    rig.num_chosen = 4
    rig.ask("short", 10, max_tokens=7)
    rig.chunks[-1].over = True
    rig.turn_until(lambda: len(rig.sent("short")) >= 7 and not rig.worker.scheduler.active)
    for _ in range(3):
        rig.turn()
    batches = [message for message in rig.said if isinstance(message, TokenBatch)]
    rows = [row for batch in batches for row in rows_of(batch)]
    _, _, indices, tokens, reasons = map(list, zip(*rows, strict=True))
    assert indices == list(range(7))
    assert tokens == [OutputToken(FIRST), *[OutputToken(NEXT, LOGPROBS)] * 6]
    assert reasons == [FinishReason.NOT_FINISHED] * 6 + [FinishReason.LENGTH]
    assert rig.allocator.num_free == rig.allocator.capacity


def test_tokens_go_out_before_a_chunk_of_a_local_prompt_and_while_it_is_computed(rig: Rig) -> None:
    begin(rig, "stream")
    rig.ask("long", 40)
    assert [chunk.chunk.start for chunk in rig.chunks[1:]] == [0]
    num_sent = len(rig.sent("stream"))
    rig.turn_until(lambda: len(rig.sent("stream")) > num_sent + 3)
    assert len(rig.chunks) == 2, "one chunk at a time"
    for _ in range(2):
        finish_chunk(rig)
    parts = [(chunk.chunk.start, chunk.chunk.is_last) for chunk in rig.chunks[1:]]
    assert parts == [(0, False), (16, False), (32, True)]
    rig.chunks[-1].over = True
    rig.turn_until(lambda: rig.sent("long")[:2] == [FIRST, NEXT])


def test_streams_get_one_token_in_each_turn_of_prompts_and_all_of_theirs_in_the_end(rig: Rig) -> None:
    begin(rig, "stream")
    now_s, page = 100.0, TurnPage(bytearray(PAGE_BYTES))
    rig.worker.steps.gate = TurnGate(page, clock=lambda: now_s)
    for turn in (1, 2):
        page.claim(turn, int((now_s + 1.0) * 1e6))
        num_steps = len(rig.steps)
        for _ in range(5):
            rig.turn()
        assert len(rig.steps) == num_steps + 1
    rig.ask("prompt", 10)
    assert len(rig.chunks) == 2, "prompts and messages do not wait"
    assert page.step_us(int(now_s * 1e6)) > 0, "the prefill worker sees that something is decoded"
    assert page.client() == 0, "for whom"
    now_s += 2.0  # the claim's writer died
    num_sent = len(rig.sent("stream"))
    rig.turn_until(lambda: len(rig.sent("stream")) > num_sent + 5)
    rig.worker.report_load()
    assert rig.worker.link._heartbeat().num_turns == 2


def test_the_router_learns_how_many_sequences_are_paused(rig: Rig) -> None:
    begin(rig, "stream")
    [sequence] = rig.worker.scheduler.active.values()
    assert rig.worker.admission.pauses.pause(group_of(sequence))
    rig.worker.report_load()
    beat = rig.worker.link._heartbeat()
    assert (beat.num_running, beat.num_paused) == (1, 1)


def test_the_router_learns_which_requests_are_here(rig: Rig) -> None:
    begin(rig, "runs")
    rig.ask("is computed", 40)
    rig.ask("waits", 10)
    names = ("runs", "is computed", "waits", "waits", "never came")
    rig.tell(Inquiry(names, pack_ids([0, 0, 0, 1, 0])))
    rig.turn_until(lambda: any(isinstance(message, InquiryReply) for message in rig.said))
    [reply] = [message for message in rig.said if isinstance(message, InquiryReply)]
    assert reply.are_here == bytes([1, 1, 1, 0, 0])


def test_the_router_learns_of_handoffs_also_while_they_wait_for_room(rig: Rig) -> None:
    rig.ask("fills it", 400)
    met(rig.worker.sources, FakePool())
    rig.announce("waits", 200)
    rig.announce("is computed elsewhere", 200)
    rig.offer(kv_offer("waits", range(13)))
    names = ("waits", "is computed elsewhere", "never came")
    rig.tell(Inquiry(names, pack_ids([0, 0, 0])))
    rig.turn_until(lambda: any(isinstance(message, InquiryReply) for message in rig.said))
    assert InquiryReply("d", 1, names, pack_ids([0, 0, 0]), b"\1\0\0") in rig.said
    assert len(rig.worker.pulls.waiting) == 1


def test_what_is_given_back_is_said_before_the_router_is_answered_that_it_is_not_here(rig: Rig) -> None:
    rig.tell(prefill_request("too much", range(40), most_tokens=8))
    rig.turn()
    met(rig.worker.sources, FakePool())
    rig.announce("uneven", 30)
    rig.offer(kv_offer("uneven", range(7)))
    rig.tell(Inquiry(("too much", "uneven"), pack_ids([0, 0])))
    rig.turn_until(lambda: any(isinstance(message, InquiryReply) for message in rig.said))
    told = [message for message in rig.said if isinstance(message, RequestFailed | InquiryReply)]
    assert [type(message) for message in told] == [RequestFailed, RequestFailed, InquiryReply]
    assert [rig.failed(name) for name in ("too much", "uneven")] == [[ErrorCode.NOT_HERE], [ErrorCode.INTERNAL]]


def test_a_prompt_that_can_never_be_decoded_here_is_refused_when_it_is_announced(rig: Rig) -> None:
    rig.tell(decode_request("strange", [1, VOCAB]))
    rig.tell(decode_request("long", range(513)))
    rig.turn_until(lambda: bool(rig.failed("strange") and rig.failed("long")))
    assert (rig.failed("strange"), rig.failed("long")) == ([ErrorCode.INTERNAL], [ErrorCode.NEVER_FITS])
    met(rig.worker.sources, FakePool())
    rig.announce("odd", 20)
    rig.offer(kv_offer("odd", range(2), token_id=VOCAB))
    rig.turn_until(lambda: rig.failed("odd") == [ErrorCode.INTERNAL])
    assert not rig.worker.pulls.waiting and ("odd", 0) not in rig.worker.arrivals.announced


def test_without_a_memory_server_what_is_announced_goes_back_to_the_router(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its offer would never come, while the prefill worker has it, and this worker would wait for it."""
    rig.announce("a", 20)
    monkeypatch.setattr(rig.pool, "problem", "lost")
    rig.worker._lease_blocks()
    rig.tell(decode_request("b", range(20)))
    rig.turn_until(lambda: bool(rig.failed("b")))
    assert rig.failed("a") == rig.failed("b") == [ErrorCode.DRAINING]


def test_what_is_announced_twice_counts_once_and_an_abort_or_a_new_router_ends_it(rig: Rig) -> None:
    for name in ("a", "b"):
        rig.announce(name, 20)
    rig.tell(decode_request("a", range(20)))
    rig.turn_until(lambda: rig.worker.link.spoke.drops.dropped == 1)
    rig.tell(Abort("a", 0))
    rig.turn_until(lambda: ("a", 0) not in rig.worker.arrivals.announced)
    assert ("b", 0) in rig.worker.arrivals.announced
    rig.worker.cancellation.drop_all()
    assert ("b", 0) not in rig.worker.arrivals.announced and not rig.worker.cancellation.owns_something


def test_blocks_of_an_aborted_local_prompt_are_free_when_its_chunk_is_over(rig: Rig) -> None:
    rig.ask("long", 40)
    rig.ask("next", 10)
    rig.tell(Abort("long", 0))
    rig.turn_until(lambda: bool(rig.worker.local_prompts.scheduler.removed))
    assert rig.allocator.num_free < rig.allocator.capacity, "the chunk still writes"
    finish_chunk(rig)
    rig.chunks[-1].over = True
    rig.turn_until(lambda: bool(rig.sent("next")))
    assert not rig.sent("long")
    rig.allocator.check(blocks_of_worker(rig.worker))


def test_a_short_local_prompt_overtakes_between_the_chunks_of_a_long_one(rig: Rig) -> None:
    rig.ask("long", 100)
    rig.ask("other", 100)
    rig.ask("short", 4)
    for _ in range(3):
        finish_chunk(rig)
    parts = [(chunk.chunk.start, len(chunk.chunk.token_ids)) for chunk in rig.chunks]
    assert parts == [(0, 16), (0, 4), (16, 16), (32, 16)], "a third of the tokens goes ahead of its turn"
    rig.turn_until(lambda: rig.sent("short")[:2] == [FIRST, NEXT])
    assert len(rig.worker.local_prompts.scheduler.waiting) == 1, "the other one holds nothing yet"


def test_local_prompts_aborted_before_between_and_amid_their_chunks_leave_nothing(rig: Rig) -> None:
    rig.ask("amid", 100)
    rig.ask("before", 50)
    rig.ask("between", 4)
    finish_chunk(rig)
    for name in ("amid", "before", "between"):
        rig.tell(Abort(name, 0))
    rig.turn_until(lambda: len(rig.worker.local_prompts) == 1)
    rig.chunks[-1].over = True
    rig.turn_until(lambda: not len(rig.worker.local_prompts))
    rig.allocator.check([])


def test_a_row_without_a_token_to_choose_fails_and_the_others_go_on(rig: Rig) -> None:
    for name in ("bad", "good"):
        begin(rig, name)
    rig.without_choice.add("bad")
    rig.turn_until(lambda: bool(rig.failed("bad")))
    num_sent = len(rig.sent("good"))
    rig.turn_until(lambda: len(rig.sent("good")) > num_sent + 3)
    assert rig.failed("bad") == [ErrorCode.NO_CHOICE] and not rig.failed("good")
    assert set(rig.sent("bad")) == {FIRST, NEXT}
    assert [sequence.request.request_id for sequence in rig.worker.scheduler.rows.sequences] == ["good"]
    rig.allocator.check(blocks_of_worker(rig.worker))


def test_a_local_prompt_without_a_token_to_choose_fails_and_leaves_nothing(rig: Rig) -> None:
    rig.ask("bad", 10)
    rig.chunks[-1].token, rig.chunks[-1].over = NO_CHOICE, True
    rig.turn_until(lambda: rig.failed("bad") == [ErrorCode.NO_CHOICE])
    assert not rig.sent("bad") and not rig.worker.scheduler.active
    assert rig.allocator.num_free == rig.allocator.capacity


def test_an_attempt_that_comes_twice_is_served_once_and_a_strange_token_is_given_back(rig: Rig) -> None:
    begin(rig, "a")
    again = prefill_request("a", range(10))
    rig.tell(again)
    strange = prefill_request("strange", [1, VOCAB])
    rig.tell(strange)
    rig.turn_until(lambda: any(isinstance(message, RequestFailed) for message in rig.said))
    assert rig.worker.link.spoke.drops.dropped == 1
    [failed] = [message for message in rig.said if isinstance(message, RequestFailed)]
    assert (failed.request_id, failed.code) == ("strange", ErrorCode.INTERNAL)
    rig.turn_until(lambda: len(rig.sent("a")) == 100)
    rig.allocator.check([])


def test_a_local_prompt_waits_for_its_mask_and_one_without_a_grammar_does_not(rig: Rig) -> None:
    digits = json.dumps({"grammars": [{"lark_grammar": "start: /[0-9]{9}/"}]})
    for name, grammar in (("held", digits), ("bad", "no grammar"), ("free", "")):
        sampling = SamplingParams(grammar=grammar)
        rig.tell(prefill_request(name, range(10), sampling=sampling))
    rig.turn_until(lambda: rig.failed("bad") == [ErrorCode.GRAMMAR])
    for _ in range(2):
        rig.turn_until(lambda: bool(rig.chunks))
        rig.chunks[-1].over = True
        num_launched = len(rig.chunks)
        if num_launched < 2:
            rig.turn_until(lambda: len(rig.chunks) > num_launched)  # noqa: B023 - it is called at once
    masks = [chunk.chunk.mask for chunk in rig.chunks]
    assert [mask is None for mask in masks].count(True) == 1
    (mask,) = [mask for mask in masks if mask is not None]
    assert 0 < int(np.unpackbits(mask.view(np.uint8)).sum()) < VOCAB // 4
    rig.turn_until(lambda: rig.failed("held") == [ErrorCode.GRAMMAR])  # the token that the bench chooses is no digit
    assert rig.sent("held") == [] and len(rig.sent("free")) > 0
    rig.allocator.check(blocks_of_worker(rig.worker))
