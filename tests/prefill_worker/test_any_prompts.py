"""Prompts that begin alike, whatever happens to them: who computes one reads what it would have computed itself."""

import random
from collections import deque
from collections.abc import Callable
from typing import cast

import pytest

from common.memory.blocks.answers import Answer
from common.serving.prompts.scheduler import Chunk
from common.wire.messages.memory import OfBlocks
from prefill_worker.sequence import PrefillSequence
from tests.prefill_worker.test_prefixes import BLOCK, US, House
from tests.support.allocator import check_owned
from tests.support.marks import first_then
from tests.support.sequences import blocks_of_prompts, taken

NUM_BLOCKS = 24
TEXTS = [list(range(base, base + 60)) for base in (0, 1000)]
TEXTS += [[*TEXTS[0][:22], *range(2000, 2040)]]
FEW = 14
"""Prompts that wait in most walks; the server looks through the whole queue at each message."""


def most_prompts(walk: int) -> int:
    """Return how many prompts may wait in a walk: in every eighth all that come."""
    return FEW if walk % 8 else 1000


class World(House):
    """Messages take their time in both directions, and steps, too; `written` is what is in a block."""

    def __init__(self) -> None:
        super().__init__(num_blocks=NUM_BLOCKS, num_at_hand=0)
        self.answers: deque[Answer] = deque()
        self.in_flight: deque[list[Chunk[PrefillSequence]]] = deque()
        self.written: dict[int, bytes] = {}
        self.taken: list[tuple[list[int], list[int]]] = []
        self.num_prompts = self.num_saved = 0
        self.most_prompts = FEW

    def add_prompt(self, text: int, length: int, priority: int, holder: tuple[str, int] | None = None) -> None:
        if len(self.scheduler.prompts) >= self.most_prompts:
            return
        self.num_prompts += 1
        tail = [5000 + self.num_prompts] * (length % 2)  # what nobody else has, or nothing
        self.add(f"{self.num_prompts}", [*TEXTS[text][:length], *tail], priority=priority, holder=holder)

    def say(self) -> None:
        """The server hears the next message."""
        if self.said:
            self.answers += self.pools.handle(US, cast(OfBlocks, self.said.pop(0)))

    def hear_next(self) -> None:
        if self.answers:
            self.hear([self.answers.popleft()])

    def launch(self) -> None:
        """A step begins, and reads what is before its chunks."""
        self.leases.update((0,), (0,))
        if len(self.in_flight) < 2 and (chunks := self.scheduler.schedule()):
            for chunk in chunks:
                self._compute(chunk.sequence, chunk.num_tokens)
            self.in_flight.append(chunks)
            self.scheduler.launched(chunks)

    def _compute(self, sequence: PrefillSequence, num_tokens: int) -> None:
        begin, end, blocks = sequence.num_scheduled_tokens, sequence.num_scheduled_tokens, sequence.tables[0].block_ids
        end += num_tokens
        for number in range(begin // BLOCK):
            assert self.written[blocks[number]] == sequence.beginning.digests[number], "it reads what another one wrote"
        if not sequence.num_in_flight:
            self.num_saved += sequence.beginning.num_sealed
        for number in range(begin // BLOCK, -(-end // BLOCK)):
            digest = sequence.beginning.digests[number] if (number + 1) * BLOCK <= end else b"of a part"
            assert number >= sequence.beginning.num_sealed, "it writes what others read"
            self.written[blocks[number]] = digest

    def collect(self) -> None:
        """The oldest step ends; complete prompts are handed over, and over at once."""
        if not self.in_flight:
            return
        chunks = self.in_flight.popleft()
        self.scheduler.collected([chunk.sequence for chunk in chunks])
        reached = [(each, self.num_computed(each)) for each in (chunk.sequence for chunk in chunks) if not each.ended]
        self.prefixes.computed(reached, self.scheduler.waiting)
        for sequence, num_tokens in reached:
            if num_tokens == len(sequence.token_ids):
                self.leases.free(taken(self.scheduler, sequence))

    def num_computed(self, sequence: PrefillSequence) -> int:
        """Tokens that no step in flight computes."""
        launched = (chunk for step in self.in_flight for chunk in step if chunk.sequence is sequence)
        return sequence.num_scheduled_tokens - sum(chunk.num_tokens for chunk in launched)

    def remove(self, place: int) -> None:
        if sequences := list(self.scheduler.prompts.values()):
            self.scheduler.remove(sequences[place % len(sequences)].request.request_id, 0)

    def others_take(self, num_blocks: int) -> None:
        if not self.taken and num_blocks <= self.pools.pools[self.leases.shape.layout].index.num_free[0]:
            block_ids, generations = self.take_away(num_blocks)
            self.written.update(dict.fromkeys(block_ids, b"another's"))
            self.taken.append((block_ids, generations))

    def others_give_back(self) -> None:
        if self.taken:
            self.give_back(*self.taken.pop())

    def acts(self, rng: random.Random) -> list[tuple[int, Callable[[], None]]]:
        """What may happen, and how often."""
        return [
            (8, lambda: self.add_prompt(rng.randrange(len(TEXTS)), rng.randint(1, 55), rng.randrange(2))),
            (6, self.say), (6, self.hear_next), (6, self.launch), (6, self.collect),
            (2, lambda: self.remove(rng.randrange(10))),
            (1, lambda: self.others_take(rng.randint(1, 20))), (1, self.others_give_back), (1, self.wait),
        ]  # fmt: skip

    def act(self, rng: random.Random) -> None:
        """Something that may happen now."""
        weights, acts = zip(*self.acts(rng), strict=True)
        rng.choices(acts, weights)[0]()
        check_owned(self.leases, [*blocks_of_prompts(self.scheduler), *self.filled()])

    def wait(self) -> None:
        self.now_s += 1.0

    def go_on(self) -> None:
        """Whatever else there is."""

    def settle(self) -> None:
        """Everything that is here is computed, whatever came before."""
        self.others_give_back()
        for _ in range(2000):
            if not self.scheduler.prompts and not self.in_flight:
                break
            for act in (self.say, self.hear_next, self.launch, self.collect, self.go_on):
                act()
            self.now_s += 0.01
        assert not self.scheduler.prompts, "somebody waits for ever"
        while self.said or self.answers:
            self.say()
            self.hear_next()
        assert not self.prefixes.grants.asked and not self.prefixes.computing and not len(self.leases.references)


@pytest.mark.medium
@pytest.mark.parametrize("seed", first_then(pytest.mark.slow, range(4)))
def test_whatever_happens_nobody_reads_another_text_nor_waits_for_ever(seed: int) -> None:
    num_prompts = num_saved = 0
    for walk in range(40):
        rng, world = random.Random(f"{seed} {walk}"), World()
        world.most_prompts = most_prompts(walk)
        for _ in range(80):
            world.act(rng)
        world.settle()
        num_prompts, num_saved = num_prompts + world.num_prompts, num_saved + world.num_saved
    assert num_saved > num_prompts, "hardly anything was found"
