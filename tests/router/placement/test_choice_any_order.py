"""Whatever happened to workers and pools before: the choice is that of a look at all pairs."""

import random
from array import array

import pytest

from common.settings.config import NetSection
from common.wire.messages.memory_reports import BlockEvent
from common.wire.messages.worker import Role
from common.wire.values.block_key import short_keys_in_group
from common.wire.values.kv_layout import KVLayout
from router.placement.choice import choose
from router.placement.member import NO_TRANSPORT, Member
from router.placement.predictions import MOMENT_S, Prediction
from router.placement.route import Demand, Route
from router.placement.text_keys import TextKeys
from router.placement.worker_pool import WorkerPool
from tests.router.placement.full_scan import FullScan
from tests.support.layouts import full, window
from tests.support.messages import LAYOUT, heartbeat, kv_path, worker_ready

MIXED = KVLayout("mixed", (full(1, 1, 8, 4, "bfloat16"), window(4, 8)))
NUM_BLOCKS = 12
NUM_GPUS, NUM_HOSTS = 8, 3
Sent = tuple[Route, int, list[Prediction]]


class World:
    """A system that changes at random, as far as a router sees it."""

    def __init__(self, seed: int) -> None:
        self.rng, self.now_s, self.num_joined = random.Random(seed), 1000.0, 0
        self.layout = self.rng.choice([LAYOUT, LAYOUT, MIXED])
        self.takes_replies, self.share_proven = self.rng.random() < 0.7, self.rng.choice([0.5, 0.95, 1.0])
        self.share_alone, self.min_tokens = self.rng.choice([0.0, 0.0, 0.2]), self.rng.choice([0, 0, 40])
        self.pool = WorkerPool(NetSection(), self.rng.choice([1.0, 2.0, 3.0]), clock=lambda: self.now_s)
        shared = [self.rng.getrandbits(60) for _ in range(NUM_BLOCKS)]
        ends = [[self.rng.getrandbits(60) for _ in range(NUM_BLOCKS)] for _ in range(5)]
        self.texts = [
            array("Q", shared[:length] + end[length:]) for length, end in zip((0, 4, 4, 8, 12), ends, strict=True)
        ]
        self.sent: list[Sent] = []
        for _ in range(self.rng.randint(2, 20)):
            self.join()

    def join(self) -> None:
        self.num_joined += 1
        role, gpu = self.rng.choice(list(Role)), self.rng.randrange(NUM_GPUS)
        is_prefill = role is Role.PREFILL
        ready = worker_ready(
            f"{role.label}-{self.num_joined}", role, kv_layout=self.layout, num_blocks=(100,) * len(self.layout.groups),
            max_model_len=self.rng.choice([4000] * 5 + [150]), max_num_seqs=self.rng.choice([8, 16]),
            max_batch_tokens=300 if is_prefill else 0, memory_server_id=f"m{gpu}", memory_server_epoch=1, pool_id=1,
            takes_replies=is_prefill and self.takes_replies, prefix_min_tokens=self.min_tokens,
            transport=NO_TRANSPORT if self.rng.random() < self.share_alone else "host",
            standby=self.rng.choice([0] * 8 + [1]),
        )  # fmt: skip
        worker = self.pool.add(ready, self.now_s)
        worker.joined_s = 0.0  # its paths are not waited for
        self.try_paths(worker)

    def try_paths(self, worker: Member) -> None:
        block_gb = self.layout.groups[0].block_bytes / 1e9
        for other in list(self.pool):
            prefill, decode = (worker, other) if worker.ready.role is Role.PREFILL else (other, worker)
            are_pair = prefill.ready.role is Role.PREFILL and decode.ready.role is Role.DECODE
            if are_pair and decode.ready.transport != NO_TRANSPORT and self.rng.random() < self.share_proven:
                is_near = int(prefill.pool[0][1:]) % NUM_HOSTS == int(decode.pool[0][1:]) % NUM_HOSTS
                rate = 100.0 if is_near else block_gb * self.rng.choice([0.0, 1.0, 1.3, 8.0])
                error = self.rng.choice([""] * 20 + ["broken"])
                rate = 0.0 if prefill.pool == decode.pool else rate
                self.pool.set_path(kv_path(prefill.id, decode.id, gb_per_s=rate, error=error))

    def happen(self) -> None:
        """Let one thing happen to a worker, its pool or a sequence."""
        worker, event = self.rng.choice(list(self.pool)), self.rng.random()
        if event < 0.05:
            worker.silent = not worker.silent
        elif event < 0.06:
            self.pool.drain(worker)
        elif event < 0.08 and len(list(self.pool)) > 2:
            self.pool.remove(worker)
        elif event < 0.11:
            self.join()
        elif event < 0.15:
            self.try_paths(worker)
        elif event < 0.3:
            num_free = tuple(self.rng.randint(0, 100) for _ in self.layout.groups)
            block_us, taking_us = self.rng.choice([0, 900_000, 1_000_000]), self.rng.choice([0, 5000])
            beat = heartbeat(worker.id, num_free_blocks=num_free, prompt_block_us=block_us, taking_us=taking_us)
            self.pool.beat(beat, self.now_s)
        elif event < 0.6:
            self.report_blocks(worker)
        elif event < 0.8 and self.sent:
            self.end(*self.sent.pop(self.rng.randrange(len(self.sent))))
        elif event < 0.85:
            self.now_s += self.rng.choice([0.3, 1.5]) * MOMENT_S

    def report_blocks(self, worker: Member) -> None:
        contents, keys = self.pool.prefixes.contents(worker.pool), self.rng.choice(self.texts)
        if not contents.is_reported:
            contents.begin()
        begin = self.rng.choice([0, 0, 0, self.rng.randrange(NUM_BLOCKS)])
        event = self.rng.choice([BlockEvent.SEALED] * 4 + [BlockEvent.GONE, BlockEvent.PARKED])
        for group in range(len(self.layout.groups)):
            if group == 0 or self.rng.random() < 0.8:
                contents.apply(event, short_keys_in_group(keys[begin : begin + self.rng.choice([4, 8, 12])], group))
        contents.copy_us = self.rng.choice([0, 100])
        if self.rng.random() < 0.03:
            contents.forget_reports()

    def demand(self) -> Demand:
        size, keys = self.layout.block_size, self.rng.choice(self.texts)
        num_tokens = self.rng.choice([1, 20, 6 * size, NUM_BLOCKS * size, NUM_BLOCKS * size - 1, NUM_BLOCKS * size + 3])
        texts = (TextKeys(self.layout, b"", keys[: num_tokens // size]),) if self.rng.random() < 0.9 else ()
        avoided = self.rng.choice([None, None, None, *self.pool])
        is_trial, max_total = self.rng.random() < 0.05, num_tokens + self.rng.choice([5, 50, 2000])
        return Demand(num_tokens, max_total, avoided, is_trial, texts)

    def send(self, route: Route, demand: Demand) -> None:
        self.pool.ledger.assign(route, demand.num_tokens, is_trial=demand.is_trial)
        predicted = [self.pool.prefixes.predict(w.pool, text.keys) for w in route.workers for text in demand.texts]
        self.sent.append((route, demand.num_tokens, predicted))

    def end(self, route: Route, num_tokens: int, predicted: list[Prediction]) -> None:
        self.pool.ledger.release_prompt(route, num_tokens)
        self.pool.ledger.prove(route)
        self.pool.ledger.release(route)
        for prediction in predicted:
            self.pool.prefixes.end(prediction)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 200))])
def test_the_choice_is_that_of_a_look_at_all_pairs(seed: int) -> None:
    world, num_found = World(seed), 0
    for _ in range(100):
        world.happen()
        demand, overtakes = world.demand(), world.rng.random() < 0.2
        every, route = FullScan(world.pool, demand, overtakes), choose(world.pool, demand, overtakes=overtakes)
        if route is None or every.pair is None:
            assert route is None and every.pair is None
            continue
        num_found += route.cost.num_expected > 0
        assert (route.prefill, route.decode) == every.pair and route.cost == every.cost
        assert route.holder is every.holder(route.prefill)
        assert (route.num_pairs, route.num_wasted) == (every.num_pairs, every.num_wasted)
        if world.rng.random() < 0.8:
            world.send(route, demand)
    assert num_found
