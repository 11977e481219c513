"""Keys of blocks: what they are, byte for byte, and what changes them."""

import random
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from common.wire.values.block_key import (
    STRETCH_BLOCKS,
    TextDigests,
    digests,
    keys_in_group,
    pack_keys,
    root_of,
)
from common.wire.values.fields import KEY_BYTES
from common.wire.values.kv_layout import CacheKind
from common.wire.values.packing import pack_ids
from tests.support.layouts import one_group

LAYOUT = one_group("model", 2, 1, 4, 4, "bfloat16")


def test_golden_keys() -> None:
    """Other processes, of other versions, too, must find the same."""
    root = root_of(LAYOUT)
    assert root.hex() == "db65d569f7eb0fa605b6f3992c11a49054a793112aaba2bdf3db35efd6b04904"
    found = digests(root, pack_ids(range(11)), 4)
    assert [digest.hex()[:16] for digest in found] == ["697fb4993bcb7da5", "0fd1afc627acb800"]
    assert found[0] == sha256(root + b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0").digest()


def test_a_key_stands_for_all_tokens_up_to_there() -> None:
    root = root_of(LAYOUT)
    text = digests(root, pack_ids(range(16)), 4)
    assert digests(root, pack_ids([*range(9), 99, *range(10, 16)]), 4)[:2] == text[:2]
    assert not set(digests(root, pack_ids([*range(9), 99, *range(10, 16)]), 4)[2:]) & set(text)
    assert not set(digests(root, pack_ids([5, 4, 5, 6, 7]), 1)) & set(text)
    assert digests(text[1], pack_ids(range(8, 16)), 4) == text[2:], "it goes on where a text has got to"


def test_only_full_blocks_have_keys() -> None:
    root = root_of(LAYOUT)
    assert digests(root, b"", 4) == digests(root, pack_ids(range(3)), 4) == []
    assert [len(digests(root, pack_ids(range(count)), 4)) for count in (4, 7, 8)] == [1, 1, 2]


def test_texts_that_begin_as_others_did_have_the_same_keys() -> None:
    rng, root = random.Random(3), root_of(LAYOUT)
    texts = TextDigests(4, max_stretches=5)
    known = [[rng.randrange(9) for _ in range(3 * STRETCH_BLOCKS * 4 + 7)] for _ in range(3)]
    for _ in range(60):
        ids = rng.choice(known)[: rng.choice((0, 3, 4, 255, 256, 257, 512, 600, 775))]
        ids = [*ids, *(rng.randrange(9) for _ in range(rng.choice((0, 1, 300))))]
        parent = rng.choice((root, sha256(root).digest()))
        assert texts.of(parent, pack_ids(ids)) == digests(parent, pack_ids(ids), 4)
        assert len(texts._stretches) <= 5


def test_texts_of_other_models_numbers_and_salts_share_nothing() -> None:
    [group] = LAYOUT.groups
    others = [replace(group, dtype="float16"), replace(group, kind=CacheKind.WINDOW, window=64)]
    others += [replace(others[-1], window=65), replace(group, scales="0123456789abcdef")]
    roots = {
        root_of(LAYOUT),
        root_of(LAYOUT, b"tenant"),
        root_of(LAYOUT, b"another"),
        root_of(replace(LAYOUT, fingerprint="other")),
        root_of(replace(LAYOUT, groups=(group, group))),
        *(root_of(replace(LAYOUT, groups=(other,))) for other in others),
    }
    assert len(roots) == 9


@pytest.mark.parametrize("stored", [{"num_layers": 1}, {"num_kv_heads": 2}, {"head_dim": 8}, {"block_size": 8}])
def test_a_text_has_one_root_however_its_blocks_are_stored(stored: dict[str, Any]) -> None:
    """A rank that has some heads of each block finds what another rank finds."""
    assert root_of(replace(LAYOUT, groups=(replace(LAYOUT.groups[0], **stored),))) == root_of(LAYOUT)


def test_keys_travel() -> None:
    found = digests(root_of(LAYOUT), pack_ids(range(8)), 4)
    packed = pack_keys(found)
    assert packed == found[0][:KEY_BYTES] + found[1][:KEY_BYTES]
    assert pack_keys([]) == b""


def test_keys_of_several_groups_are_those_of_each() -> None:
    keys, groups = [bytes([number] * 16) for number in range(6)], [0, 2, 1, 1, 7, 0]
    marked = keys_in_group(b"".join(keys), np.array(groups))
    assert marked == b"".join(map(keys_in_group, keys, groups))
    assert keys_in_group(marked, np.array(groups)) == b"".join(keys)
