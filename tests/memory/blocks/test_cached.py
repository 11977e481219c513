"""The order of blocks that nobody reads, against an ordered dict."""

from collections import OrderedDict
from random import Random

import numpy as np

from common.memory.blocks.cached import CachedBlocks

NUM_IDS = 300


def test_blocks_go_in_the_order_in_which_they_came_however_many_are_read_again() -> None:
    random, cached, model = Random(7), CachedBlocks(NUM_IDS), OrderedDict[int, None]()
    num_evicted = 0
    for _ in range(2000):
        away = [block_id for block_id in range(NUM_IDS) if block_id not in model]
        added = random.sample(away, random.randint(0, min(len(away), random.choice((1, 20, NUM_IDS)))))
        cached.add(np.array(added, np.intp))
        model.update(dict.fromkeys(added))
        removed = random.sample(list(model), random.randint(0, len(model)) * random.randint(0, 1))
        cached.remove(np.array(removed, np.intp))
        for block_id in removed:
            del model[block_id]
        count = random.randint(min(1, len(model)), min(len(model), random.choice((1, 20, NUM_IDS))))
        assert not count or cached.evict(count).tolist() == [model.popitem(last=False)[0] for _ in range(count)]
        assert cached.block_ids.tolist() == list(model) and len(cached) == len(model)
        num_evicted += count
    assert num_evicted > 10 * NUM_IDS
