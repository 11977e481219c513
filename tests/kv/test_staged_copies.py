"""Copies out of staging into a GPU's pool, whatever else the process does with the GPU."""

import threading
import time

import pytest
import torch

from common.kv.pool import KVPool
from common.kv.staged_copies import StagedCopies, copies_into
from common.wire.values.pool_shape import PoolShape
from tests.kv.peer_process import BLOCK_BYTES, LAYOUT, random_bytes

pytestmark = pytest.mark.gpu

NUM_BLOCKS, NUM_ADDED, CAPTURE_S = 8, 100, 0.5


def test_staging_is_made_and_copied_while_another_thread_captures_a_graph() -> None:
    shape = PoolShape(LAYOUT, (NUM_BLOCKS,))
    pool = KVPool(shape, torch.zeros(shape.num_bytes, dtype=torch.uint8, device="cuda:0"))
    staged, made, problems = random_bytes(1, NUM_BLOCKS), list[StagedCopies](), list[BaseException]()
    is_captured = threading.Event()

    def work() -> None:
        try:
            copies = copies_into(pool, NUM_BLOCKS * BLOCK_BYTES)
            made.append(copies)
            copies.staging.content[:] = staged.flatten().numpy()
            num_rounds = 0
            while not is_captured.is_set() or not num_rounds:
                copies.begin([5, 6, 1], 2 * BLOCK_BYTES)
                while not copies.num_over():
                    time.sleep(1e-4)
                num_rounds += 1
        except BaseException as problem:  # noqa: BLE001 - told to the test
            problems.append(problem)

    total, graph = torch.zeros(1, device="cuda:0"), torch.cuda.CUDAGraph()
    total.add_(0)
    torch.cuda.synchronize()
    thread = threading.Thread(target=work)
    with torch.cuda.graph(graph):
        thread.start()
        for _ in range(NUM_ADDED):
            total.add_(1)
            time.sleep(CAPTURE_S / NUM_ADDED)
    is_captured.set()
    thread.join(60)
    assert not problems and made
    made[0].finish()
    graph.replay()
    assert int(total) == NUM_ADDED
    expected = torch.zeros_like(staged)
    expected[[5, 6, 1]] = staged[[2, 3, 4]]
    assert torch.equal(pool.blocks[0].cpu(), expected)
