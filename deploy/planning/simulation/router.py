"""The router of a simulation: the real queue and the real choice of workers, for simulated requests."""

from array import array
from collections.abc import Iterator, Sequence
from itertools import product

from common.settings.config import NetSection, RouterSection
from common.wire.messages.memory_reports import BlockEvent
from common.wire.messages.worker import KVPathReport, Role, WorkerReady
from common.wire.values.fields import MAX_INT32
from common.wire.values.kv_layout import CacheKind, KVGroup, KVLayout
from deploy.planning.simulation.events import Events
from deploy.planning.simulation.layout import Place
from deploy.planning.simulation.loads import BLOCK_SIZE, Prefix
from deploy.planning.simulation.prefill import LIMITS
from deploy.planning.simulation.request import Request
from deploy.planning.step_times.costs import Costs
from router.dispatch.scheduler import starts
from router.dispatch.waiting_queue import WaitingQueue
from router.placement.capacity import has_choice
from router.placement.member import UNKNOWN, Speeds
from router.placement.prefix_map import PoolContents
from router.placement.text_keys import TextKeys
from router.placement.worker_pool import WorkerPool

LAYOUT = KVLayout("model", (KVGroup(CacheKind.FULL, 1, 1, 1, BLOCK_SIZE, 0, "bfloat16"),))
"""Layout by which the router finds prefixes; rates are told in its bytes."""


class Router:
    """A router and its queue of unassigned requests.

    Args:
        kv_tokens: tokens of KV of each GPU.
        gb_per_s: rate between two hosts.
    """

    def __init__(
        self, places: Sequence[Place], kv_tokens: Sequence[int], costs: Costs, events: Events, gb_per_s: float = 0.0
    ) -> None:
        limits = RouterSection()
        self._pool = WorkerPool(NetSection(), limits.prefill_window, lambda: events.now_ms / 1e3)
        self._queue = WaitingQueue[Request](limits)
        speeds = Speeds(block_us=round(BLOCK_SIZE * costs.token_us)) if gb_per_s else UNKNOWN
        for place in places:
            self._pool.add(_ready(place, kv_tokens[place.gpu], costs), 0.0).speeds = speeds
        rate = gb_per_s * LAYOUT.groups[0].block_bytes / (BLOCK_SIZE * max(1, costs.rates.shape.kv_bytes))
        for prefill, decode in product(places, places):
            if (prefill.role, decode.role) == (Role.PREFILL, Role.DECODE):
                told = ("cuda_ipc", 0.0) if prefill.host == decode.host else ("nixl tcp", rate)
                self._pool.set_path(KVPathReport(decode.name, 1, prefill.name, 1, *told, ""))
        self._texts: dict[Prefix, TextKeys] = {}
        self._has_choice = has_choice(self._pool)

    def contents(self, gpu: int) -> PoolContents:
        """Return the router's view of the prefixes on a GPU."""
        return self._pool.prefixes.contents((f"gpu{gpu}", 1))

    def submit(self, request: Request) -> None:
        """Queue a new request."""
        if (prefix := request.prefix) is not None and self._has_choice:
            if prefix not in self._texts:
                self._texts[prefix] = TextKeys(LAYOUT, b"", array("Q", prefix.keys))
            request.texts = (self._texts[prefix],)
        self._queue.add(request)

    def started(self) -> Iterator[Request]:
        """Assign queued requests to pairs with room, and yield each."""
        for request, route in starts(self._queue, self._pool):
            self._queue.take(request)
            request.route, request.num_sent = route, request.num_tokens
            self._pool.ledger.assign(route, request.num_sent)
            for pool in {worker.pool for worker in route.workers}:
                for text in request.texts:
                    self._pool.prefixes.contents(pool).apply(BlockEvent.SEALED, text.keys)
            yield request

    def lighten(self, request: Request) -> None:
        """Subtract tokens found cached by the prefill worker."""
        num_left = request.num_tokens - request.num_found
        self._pool.ledger.reduce_prompt(request.route, request.num_sent, num_left)
        request.num_sent = num_left

    def prompt_is_over(self, request: Request) -> None:
        """Note the first token of a request."""
        self._pool.ledger.release_prompt(request.route, request.num_sent)

    def is_over(self, request: Request) -> None:
        """Note the last token of a request."""
        self._pool.ledger.release(request.route)


def _ready(place: Place, kv_tokens: int, costs: Costs) -> WorkerReady:
    """Make the registration of a worker."""
    is_prefill = place.role is Role.PREFILL
    return WorkerReady(
        worker_id=place.name, epoch=1, role=place.role, pid=1, version="", device=f"cuda:{place.gpu}", model_name="",
        model_fingerprint="", tokenizer_fingerprint="", kv_layout=LAYOUT, num_blocks=(kv_tokens // BLOCK_SIZE,),
        max_model_len=MAX_INT32, max_batch_tokens=costs.step_tokens if is_prefill else 0,
        max_num_seqs=LIMITS.max_num_seqs if is_prefill else costs.max_rows, transport="cuda_ipc", handoff_endpoint="",
        standby=0, memory_server_id=f"gpu{place.gpu}", memory_server_epoch=1, pool_id=1, prefix_min_tokens=0,
        takes_replies=False, short_prompt_tokens=0,
    )  # fmt: skip
