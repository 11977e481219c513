"""A lost message is found out by asking, and neither a long queue nor a long prompt is taken for one."""

from common.wire.messages.worker import Inquiry, InquiryReply, Role
from common.wire.values.packing import pack_ids, unpack_ids
from router.dispatch.completion.state import Completion, State
from router.dispatch.inquiries import BEATS, Inquiries
from router.placement.member import Member
from tests.router.bench import NET, Bench

QUIET_S = BEATS * NET.heartbeat_s + 0.1


class Rig:
    """A bench whose clock moves in ticks, and workers that answer what the test says they have."""

    def __init__(self) -> None:
        self.bench = Bench(request_timeout_s=1e6)
        [self.prefill], [self.decode] = self.bench.prefills, self.bench.decodes
        active = self.bench.dispatcher.lifecycle.active
        self.inquiries = Inquiries(NET, self.bench.send, active.get, self.now_s)

    def now_s(self) -> float:
        return self.bench.now_s

    def pass_time(self, seconds: float = QUIET_S) -> None:
        self.bench.now_s += seconds
        self.inquiries.ask(self.bench.dispatcher.active)
        self.bench.dispatcher.tick()

    def asked(self) -> list[tuple[str, list[str], list[int]]]:
        """(worker, requests, attempts) since the last call."""
        inquiries = [(to, message) for to, message in self.bench.sent if isinstance(message, Inquiry)]
        self.bench.sent.clear()
        return [(to, list(message.request_ids), unpack_ids(message.attempts)) for to, message in inquiries]

    def answer(self, worker: Member, *completions: Completion, has: bool, attempt: int = 0) -> None:
        ids = tuple(completion.spec.request_id for completion in completions)
        attempts, are_here = pack_ids([attempt] * len(ids)), bytes([has] * len(ids))
        self.inquiries.on_reply(b"", InquiryReply(worker.id, worker.epoch, ids, attempts, are_here))
        self.pass_time(0.0)


def test_a_request_that_never_arrived_is_replayed_as_soon_as_both_workers_say_so() -> None:
    rig = Rig()
    lost, queued = rig.bench.submit(), rig.bench.submit()
    rig.pass_time(BEATS * NET.heartbeat_s - 0.1)
    assert rig.asked() == []
    rig.pass_time()
    assert rig.asked() == [("p0", ["cmpl-1", "cmpl-2"], [0, 0])]
    rig.answer(rig.prefill, lost, has=False)
    rig.answer(rig.prefill, queued, has=True)
    assert rig.asked() == [("d0", ["cmpl-1"], [0])], "it may have been handed off"
    assert lost.attempt.number == 0
    rig.answer(rig.decode, lost, has=False)
    assert (lost.attempt.number, queued.attempt.number) == (1, 0)
    assert (lost.failures.num_counted, lost.failures.num_returns) == (0, 1), "that is nobody's fault"
    assert lost.state is State.PREFILLING and rig.bench.requests()


def test_a_prompt_that_is_offered_is_with_its_prefill_worker_until_it_is_received() -> None:
    rig = Rig()
    completion = rig.bench.submit()
    rig.bench.token(rig.prefill, completion, 0, 1)
    for _ in range(100):
        rig.pass_time()
        rig.answer(rig.prefill, completion, has=True)
    assert completion.attempt.number == 0
    assert {to for to, _, _ in rig.asked()} == {"p0"}


def test_a_handoff_that_waits_at_the_decode_worker_is_found_there() -> None:
    rig = Rig()
    completion = rig.bench.submit()
    rig.bench.token(rig.prefill, completion, 0, 1)
    rig.pass_time()
    rig.answer(rig.prefill, completion, has=False)
    for _ in range(100):
        rig.answer(rig.decode, completion, has=True)
        rig.pass_time()
    assert completion.attempt.number == 0
    assert {to for to, _, _ in rig.asked()[1:]} == {"d0"}
    rig.answer(rig.decode, completion, has=False)
    assert completion.attempt.number == 1


def test_a_stream_whose_worker_has_forgotten_it_is_replayed() -> None:
    rig = Rig()
    completion = rig.bench.submit()
    rig.bench.token(rig.prefill, completion, 0, 1)
    rig.bench.token(rig.decode, completion, 1, 2)
    rig.pass_time()
    assert rig.asked() == [("d0", ["cmpl-1"], [0])]
    rig.answer(rig.prefill, completion, has=False)
    assert completion.attempt.number == 0, "it was not asked, and let go long ago"
    rig.answer(rig.decode, completion, has=False)
    assert completion.attempt.number == 1


def test_a_prompt_may_wait_for_as_long_as_its_worker_says_that_it_has_it() -> None:
    rig = Rig()
    completion = rig.bench.submit()
    for _ in range(100):
        rig.pass_time()
        rig.answer(rig.prefill, completion, has=True)
    assert completion.attempt.number == 0
    rig.pass_time(NET.step_timeout_s + 1)
    assert completion.attempt.number == 1, "nobody answers any more"


def test_an_answer_about_an_older_attempt_or_of_another_incarnation_says_nothing() -> None:
    rig = Rig()
    completion = rig.bench.submit()
    rig.bench.lose(rig.decode)
    rig.decode = rig.bench.join("d0", Role.DECODE, epoch=2)
    assert completion.attempt.number == 1
    rig.pass_time()
    rig.answer(rig.prefill, completion, has=False, attempt=0)
    rig.inquiries.on_reply(b"", InquiryReply("p0", 7, ("cmpl-1",), pack_ids([1]), bytes(1)))
    rig.asked()
    rig.pass_time()
    assert rig.asked() == [("p0", ["cmpl-1"], [1])], "the decode worker is not asked yet"
    rig.bench.dispatcher.abort(completion)
    rig.answer(rig.prefill, completion, has=False, attempt=1)
    assert completion.state is State.ABORTED
