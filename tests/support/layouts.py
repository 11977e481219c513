"""Layouts and pools for tests: those of one group, which all models here have, and made-up ones."""

from collections.abc import Iterable
from typing import Any, cast

from common.kv.blocks import Allocator
from common.kv.tables import BlockTable
from common.memory.client.lease_cache import LeaseCache
from common.serving.prompts.prefixes import PromptPrefixes
from common.settings.memory_sections import KVSection
from common.wire.values.kv_layout import CacheKind, KVGroup, KVLayout
from common.wire.values.pool_shape import PoolShape
from tests.support.allocator import BlockAllocator


def full(num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str) -> KVGroup:
    """Keys and values of all tokens."""
    return KVGroup(CacheKind.FULL, num_layers, num_kv_heads, head_dim, block_size, 0, dtype)


def window(block_size: int, num_tokens: int, head_dim: int = 1) -> KVGroup:
    """Keys and values of the last tokens."""
    return KVGroup(CacheKind.WINDOW, 1, 1, head_dim, block_size, num_tokens, "float32")


def latent(block_size: int, head_dim: int = 1) -> KVGroup:
    """One vector of each token."""
    return KVGroup(CacheKind.LATENT, 1, 1, head_dim, block_size, 0, "float32")


def state(head_dim: int = 1) -> KVGroup:
    """One block however long a sequence is."""
    return KVGroup(CacheKind.STATE, 1, 1, head_dim, 1, 0, "float32")


def one_group(
    fingerprint: str, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str
) -> KVLayout:
    """Of a model all of whose layers see all tokens."""
    return KVLayout(fingerprint, (full(num_layers, num_kv_heads, head_dim, block_size, dtype),))


def tiny(block_size: int) -> KVLayout:
    """Of one group, where only the number of tokens a block matters."""
    return one_group("model", 1, 1, 1, block_size, "float32")


def pool_of(num_blocks: int, block_size: int = 1) -> PoolShape:
    """A pool that has so many blocks to give, of one group."""
    return PoolShape(tiny(block_size), (num_blocks + 1,))


def allocator_of(num_blocks: int, block_size: int = 1) -> BlockAllocator:
    """Of such a pool."""
    return BlockAllocator(pool_of(num_blocks, block_size))


def no_prefixes(allocator: Allocator) -> PromptPrefixes[Any]:
    """Nothing is looked up or sealed."""
    return PromptPrefixes(cast(LeaseCache, allocator), lambda prompt: None, KVSection(prefix_cache=False))


def one_table(block_ids: Iterable[int], block_size: int = 1) -> list[BlockTable]:
    """Of a sequence in a layout of one group."""
    return [BlockTable(tiny(block_size).groups[0], block_ids)]


def take(allocator: Allocator, count: int) -> list[int]:
    """Blocks of the one group."""
    [block_ids] = allocator.allocate((count,))
    return block_ids
