"""A dispatcher on a bench: no sockets, a clock moved by hand, every message it sends at hand."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.base.errors import ErrorCode, RequestError
from common.settings.config import NetSection, RouterSection
from common.wire.messages.worker import (
    Abort,
    FinishReason,
    Message,
    PrefillRequest,
    PromptLogprobs,
    RequestFailed,
    Role,
    TokenBatch,
)
from common.wire.values.packing import pack_floats, pack_ids
from common.wire.values.sampling_params import SamplingParams
from router.dispatch.completion.state import Completion, State
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.metrics import Metrics
from router.dispatch.worker_reports import WorkerReports
from router.placement.member import Member
from router.placement.route import Route
from router.placement.worker_pool import WorkerPool
from router.text.detokenizer import TextStream
from router.text.stop_strings import StopAutomaton, StopMatcher
from tests.support.completions import deliveries_of, make_completion
from tests.support.messages import kv_path, worker_ready

NET = NetSection(worker_timeout_s=3.0, step_timeout_s=100.0)
VOCAB = 1000
EOS = 999
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP
TERMINAL_STATES = {State.FINISHED, State.FAILED, State.ABORTED}


def decode_ids(ids: Sequence[int]) -> str:
    """Each id is shown as a letter; EOS would show too."""
    return "".join(chr(ord("a") + token_id % 26) for token_id in ids)


class Bench:
    """A dispatcher with a hand-driven clock, and everything that it sent."""

    def __init__(self, num_prefill: int = 1, num_decode: int = 1, **router: Any) -> None:
        self.now_s = 100.0
        self.sent: list[tuple[str, Message]] = []
        self.pool = WorkerPool(NET, 2.0, lambda: self.now_s)
        self.metrics = Metrics()
        self.dispatcher = Dispatcher(RouterSection(**router), NET, self.pool, self.send, self.metrics)
        self.reports = WorkerReports(self.dispatcher.lifecycle, self.dispatcher.scheduler, self.pool, self.send, VOCAB)
        self.prefills = [self.join(f"p{i}", Role.PREFILL) for i in range(num_prefill)]
        self.decodes = [self.join(f"d{i}", Role.DECODE) for i in range(num_decode)]
        self._num_made = 0

    def send(self, to: str, message: Message) -> None:
        self.sent.append((to, message))

    def join(self, worker_id: str, role: Role, epoch: int = 1, **fields: Any) -> Member:
        worker = self.pool.add(worker_ready(worker_id, role, epoch, **fields), self.now_s)
        for other in self.pool:
            prefill, decode = (worker, other) if role is Role.PREFILL else (other, worker)
            if other.ready.role is not role:
                self.pool.set_path(kv_path(prefill.id, decode.id, prefill_epoch=prefill.epoch, epoch=decode.epoch))
        self.dispatcher.scheduler.schedule()
        return worker

    def lose(self, worker: Member) -> None:
        self.pool.remove(worker)
        self.dispatcher.on_worker_lost(worker, "test")

    def submit(
        self,
        num_prompt_tokens: int = 4,
        stops: Sequence[str] = (),
        priority: int = 0,
        *,
        num_prompt_logprobs: int = 0,
        prompt_only: bool = False,
        **sampling: Any,
    ) -> Completion:
        self._num_made += 1
        fields: dict[str, Any] = {"max_tokens": 5, "stop_token_ids": (EOS,)} | sampling
        completion = make_completion(
            f"cmpl-{self._num_made}",
            list(range(num_prompt_tokens)),
            SamplingParams(**fields),
            TextStream(decode_ids, StopMatcher(StopAutomaton(stops)) if stops else None),
            num_prompt_logprobs=num_prompt_logprobs,
            priority=priority,
            prompt_only=prompt_only,
        )
        for _ in self.dispatcher.prepare([completion]):
            pass
        self.dispatcher.submit([completion])
        return completion

    def token(
        self, worker: Member, completion: Completion, index: int, token_id: int, finish: int = 0, attempt: int = -1
    ) -> None:
        attempt = completion.attempt.number if attempt < 0 else attempt
        self.reports.on_tokens(
                b"",
            TokenBatch(
                worker.id, worker.epoch, (completion.spec.request_id,), pack_ids([attempt]), pack_ids([index]),
                pack_ids([token_id]), bytes([finish]),
            )
        )  # fmt: skip

    def prompt_logprobs(
        self, worker: Member, completion: Completion, positions: range, ids: Sequence[int] = (), attempt: int = -1
    ) -> None:
        """One entry a token: `ids`, or those of the prompt; its value tells of the attempt."""
        attempt, num = completion.attempt.number if attempt < 0 else attempt, len(positions)
        told = ids or [completion.spec.prompt_ids[position] for position in positions]
        self.reports.on_prompt_logprobs(
                b"",
            PromptLogprobs(
                worker.id, worker.epoch, completion.spec.request_id, attempt, positions.start, pack_ids([1] * num),
                pack_ids([1] * num), pack_ids(told), pack_floats([-1.0 - attempt] * num),
            )
        )  # fmt: skip

    def route(self, completion: Completion) -> Route:
        """Where it runs now."""
        assert completion.attempt.route is not None
        return completion.attempt.route

    def fail(self, worker: Member, completion: Completion, code: ErrorCode) -> None:
        message = RequestFailed(
            worker.id, worker.epoch, completion.spec.request_id, completion.attempt.number, code, "because"
        )
        self.reports.on_failed(b"", message)

    def requests(self) -> list[tuple[str, PrefillRequest]]:
        return [(to, message) for to, message in self.sent if isinstance(message, PrefillRequest)]

    def aborts(self) -> list[tuple[str, str, int]]:
        return [(to, message.request_id, message.attempt) for to, message in self.sent if isinstance(message, Abort)]

    def assert_idle(self) -> None:
        """Nothing is left of any request."""
        assert self.dispatcher.num_active == 0
        assert self.dispatcher.queue_sizes() == (0, 0, 0)
        for worker in self.pool:
            work = worker.work
            assert (work.outstanding_tokens, work.num_assigned, work.expected_blocks) == (0, 0, (0,)), worker


@dataclass
class Result:
    text: str
    finish_reason: str | None
    error: RequestError | None


def result_of(completion: Completion) -> Result:
    """All deliveries joined; exactly one of them is the last."""
    deliveries = deliveries_of(completion)
    last = [d for d in deliveries if d.finish_reason or d.error]
    assert len(last) == 1, deliveries
    assert deliveries[-1] is last[0]
    return Result("".join(d.text for d in deliveries), last[0].finish_reason, last[0].error)
