"""Rows of the embedding table, each as it lies there."""

import pytest
import torch
from torch.nn import functional

from common.kernels.base.gpu import gpu_of
from common.kernels.elementwise.embedding import embedding


@pytest.mark.parametrize(("num_tokens", "hidden"), [(0, 64), (1, 2560), (3, 33), (130, 100), (5, 1)])
def test_rows_are_those_of_the_table(num_tokens: int, hidden: int, device: torch.device, dtype: torch.dtype) -> None:
    vocab = 301
    token_ids = torch.randint(0, vocab, (num_tokens,), dtype=torch.int32)
    token_ids[:2] = torch.tensor([vocab - 1, 0])[:num_tokens]
    table = torch.full((vocab, hidden), float("nan"))
    table[token_ids.long()] = torch.randn(num_tokens, hidden)
    table = table.to(device, dtype)
    rows = embedding(token_ids.to(device), table)
    assert rows.dtype == dtype and rows.is_contiguous()
    assert torch.equal(rows, functional.embedding(token_ids.to(device), table))


def test_rows_are_scaled_and_rounded_once(device: torch.device, dtype: torch.dtype) -> None:
    table = torch.randn(40, 100).to(device, dtype)
    token_ids = torch.tensor([3, 39, 0], dtype=torch.int32, device=device)
    assert torch.equal(embedding(token_ids, table, 50.5), (table[token_ids.long()].float() * 50.5).to(dtype))


@pytest.mark.gpu
def test_a_chain_of_dependent_launches_reads_what_was_written_before(cuda: torch.device) -> None:
    """Each step embeds what the step before chose; nothing is awaited between them but by the kernels."""
    table = torch.randn(4096, 2560, device=cuda, dtype=torch.bfloat16)
    token_ids = torch.zeros(8, dtype=torch.int32, device=cuda)
    chosen = []
    for _ in range(50):
        token_ids.copy_((token_ids * 5 + torch.arange(8, dtype=torch.int32, device=cuda) + 1) % 4096)
        rows = embedding(token_ids, table, pdl=gpu_of(cuda).has_dependent_launch)
        chosen.append((rows, token_ids.clone()))
    for rows, ids in chosen:
        assert torch.equal(rows, table[ids.long()])
