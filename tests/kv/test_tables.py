"""What groups keep of a sequence, compared with what each token sees when it is looked at one by one."""

import itertools
import random

import pytest

from common.kv.tables import NO_BLOCK, BlockTable, num_handed_over, num_seen, tables_handed_over
from common.wire.values.fields import MAX_INT32
from common.wire.values.kv_layout import KVGroup, KVLayout
from tests.support.layouts import full, latent, state, window

WINDOWS = [window(block_size, tokens) for block_size, tokens in itertools.product((1, 3, 4), (1, 2, 3, 4, 5, 8, 11))]
GROUPS = [full(1, 1, 1, 4, "float32"), latent(3), state(), *WINDOWS]
IDS = [f"{group.kind.name} {group.block_size} {group.window}" for group in GROUPS]


def seen_places(group: KVGroup, num_tokens: int) -> set[int]:
    """Places of tokens that the last one sees, itself included."""
    if not group.grows:
        return {0}
    first = max(1, num_tokens - group.window + 1) if group.window else 1
    return {(token - 1) // group.block_size for token in range(first, num_tokens + 1)}


@pytest.mark.parametrize("group", GROUPS, ids=IDS)
def test_a_group_says_what_a_token_sees_and_how_many_blocks_that_takes(group: KVGroup) -> None:
    for num_tokens in range(1, 40):
        places = seen_places(group, num_tokens)
        assert places == set(range(group.first_seen(num_tokens), group.num_places(num_tokens)))
        for step_tokens in (1, 2, 5, 100):
            most = group.most_blocks(num_tokens, step_tokens)
            begun = range(1, num_tokens + 1)
            steps = ((first, min(num_tokens, first + step_tokens - 1)) for first in begun)
            wanted = (group.num_places(last) - group.first_seen(first) for first, last in steps)
            assert most >= max(wanted), "whatever the steps are"
            assert most <= max(1, -(-(group.window + step_tokens) // group.block_size) + 1) or not group.window
            longest = group.most_tokens(most, step_tokens)
            assert longest >= num_tokens
            if longest < MAX_INT32:
                assert group.most_blocks(longest, step_tokens) == most
                assert group.most_blocks(longest + 1, step_tokens) > most


@pytest.mark.parametrize("group", GROUPS, ids=IDS)
@pytest.mark.parametrize("seed", range(5))
def test_a_sequence_always_has_what_its_tokens_see_in_no_more_blocks_than_were_said(group: KVGroup, seed: int) -> None:
    """A prompt in steps of any length, then token by token; what is written stays until it is out of sight."""
    rng = random.Random(seed)
    num_prompt, budget, fresh = rng.randint(1, 50), rng.randint(1, 9), itertools.count(100)
    table = BlockTable(group, [next(fresh) for _ in range(group.most_blocks(num_prompt, budget))])
    had, written = len(table.held), dict[int, int]()  # block: place that was last written there
    done = 0
    while done < num_prompt + 30:
        last = min(num_prompt, done + rng.randint(1, budget)) if done < num_prompt else done + 1
        num_lacking = table.num_lacking(done + 1, last)
        assert done >= num_prompt or not num_lacking, "a prompt has all it needs when it begins"
        new = table.extend(done + 1, last, [next(fresh) for _ in range(num_lacking)])
        assert list(new) == list(range(len(table.block_ids) - len(new), len(table.block_ids)))
        had = max(had, len(table.held))
        for token in range(done + 1, last + 1):
            if group.grows:
                written[table.block_ids[(token - 1) // group.block_size]] = (token - 1) // group.block_size
            places = seen_places(group, token)
            assert NO_BLOCK not in {table.block_ids[place] for place in places}
            if group.grows:
                assert all(written[table.block_ids[place]] == place for place in places)
        done = last
        if done == num_prompt:
            freed = table.trim(done + 1)
            assert len(table.held) + len(freed) == had and not {*freed} & {*table.held}
    assert len(set(table.held)) == len(table.held)
    assert had <= max(group.most_blocks(num_prompt, budget), group.most_blocks(done, 1))


def test_what_is_handed_over_is_what_the_next_token_sees() -> None:
    layout = KVLayout("model", tuple(GROUPS[:8]))
    for num_tokens in range(1, 40):
        counts = num_handed_over(layout, num_tokens)
        tables = tables_handed_over(layout, num_tokens, [range(count) for count in counts])
        for group, table, count in zip(layout.groups, tables, counts, strict=True):
            places = {place for place in seen_places(group, num_tokens + 1) if place < group.num_places(num_tokens)}
            assert {place for place, block_id in enumerate(table.block_ids) if block_id != NO_BLOCK} == places
            assert len(table.held) == count
            lacking = table.num_lacking(num_tokens + 1, num_tokens + 1)
            table.extend(num_tokens + 1, num_tokens + 1, range(100, 100 + lacking))
        assert tuple(len(table.held) for table in tables) == num_seen(layout, num_tokens + 1)
