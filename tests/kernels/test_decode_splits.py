"""Into how many parts a context is divided, and that joining them reads those with keys and no others."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from common.kernels.decode_splits import TILE, check_room, combine, make_workspace, num_splits_for

AssertClose = Callable[[Tensor, Tensor], None]


def test_splits_fill_the_gpu_and_no_more() -> None:
    assert num_splits_for(1, 8, 132) == 64
    assert num_splits_for(8, 8, 132) == 8
    assert num_splits_for(64, 8, 132) == 1
    assert num_splits_for(1024, 8, 1) == 1


def test_any_batch_fits_the_workspace() -> None:
    workspace = make_workspace(256, 32, 8, 128, 132, torch.device("cpu"))
    assert workspace.partial.shape == (workspace.lse.shape[0], 128)
    for n in range(1, 257):
        check_room(workspace, n, 32, num_splits_for(n, 8, 132), 128)
    with pytest.raises(AssertionError, match="parts, the workspace holds"):
        check_room(workspace, 257, 32, 64, 128)


@pytest.mark.parametrize("num_splits", [2, 8])
def test_joined_parts_equal_the_whole(
    num_splits: int, target: tuple[str, torch.dtype], assert_close: AssertClose
) -> None:
    device, dtype = target[0], target[1]
    seq_lens = [0, *(tiles * TILE + more for tiles in range(18) for more in (1, TILE - 1, TILE)), 40 * TILE + 5]
    num_q, head_dim = 3, 32
    num_seqs = len(seq_lens)
    workspace = make_workspace(num_seqs, num_q, 1, head_dim, num_splits * num_seqs, torch.device(device))
    partial = workspace.partial[: num_seqs * num_q * num_splits].view(num_seqs, num_q, num_splits, head_dim)
    lse = workspace.lse[: num_seqs * num_q * num_splits].view(num_seqs, num_q, num_splits)
    expected = torch.zeros((num_seqs, num_q, head_dim), device=device)
    for seq, seq_len in enumerate(seq_lens):
        tiles = -(-seq_len // TILE)
        num_live = -(-tiles // -(-tiles // num_splits)) if tiles else 0
        if num_live:  # all other parts stay NaN
            partial[seq, :, :num_live] = torch.randn(num_q, num_live, head_dim).to(device)
            lse[seq, :, :num_live] = torch.randn(num_q, num_live).to(device) * 40
            shares = (lse[seq, :, :num_live] * 0.6931471805599453).softmax(dim=1)
            expected[seq] = (partial[seq, :, :num_live] * shares[:, :, None]).sum(dim=1)
    out = torch.empty((num_seqs, num_q, head_dim), dtype=dtype, device=device)
    combine(out, torch.tensor(seq_lens, dtype=torch.int32, device=device), workspace, num_splits, pdl=False)
    assert_close(out, expected.to(dtype))
    assert (out[0] == 0).all()
