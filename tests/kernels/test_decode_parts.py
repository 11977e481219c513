"""Joining the parts of contexts reads those that exist and no others, and writes the rows that were cut."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from common.kernels.decode_parts import MAX_PARTS, check_room, join_parts_of_contexts, make_workspace
from common.kernels.operands import Division

AssertClose = Callable[[Tensor, Tensor], None]


def division_of(joins: list[tuple[int, int]], device: torch.device, num_slots: int = 8) -> Division:
    """With joins for any number of programs; two more are not counted."""

    def words(*rows: object) -> Tensor:
        return torch.tensor(rows, dtype=torch.int32, device=device)

    return Division(words(), words(*joins, (7, 2), (-1, 1 << 30)), words(0, len(joins), 5), num_slots)


@pytest.mark.parametrize("num_slots", [1, 5, 300])
@pytest.mark.parametrize("head_dim", [32, 128])
def test_joined_parts_equal_the_whole(
    head_dim: int, num_slots: int, target: tuple[str, torch.dtype], assert_close: AssertClose
) -> None:
    device, dtype = torch.device(target[0]), target[1]
    num_q, joins = 3, [(4, MAX_PARTS), (0, 2), (5, 7), (2, 3)]
    workspace = make_workspace(len(joins) + 2, num_q, head_dim, device)
    out = torch.full((6, num_q, head_dim), float("nan"), dtype=dtype, device=device)
    expected = out.clone()
    for join, (row, num_parts) in enumerate(joins):
        maxima = torch.randn(num_parts, num_q) * 40  # all other parts stay NaN
        sums, partial = torch.rand(num_parts, num_q) * 60 + 1, torch.randn(num_parts, num_q, head_dim)
        workspace.maxima[join, :num_parts] = maxima.to(device)
        workspace.sums[join, :num_parts] = sums.to(device)
        workspace.partial[join, :num_parts] = partial.to(device)
        scales = (maxima - maxima.amax(dim=0)).double().exp2()
        whole = (partial * scales[:, :, None]).sum(dim=0) / (sums * scales).sum(dim=0)[:, None]
        expected[row] = whole.to(device, dtype)
    division = division_of(joins, device, num_slots)
    join_parts_of_contexts(out, division, workspace, pdl=False)
    assert division.counts.tolist() == [0, len(joins), 0], "nothing is drawn yet of the next layer's items"
    for row in range(6):
        if row in (4, 0, 5, 2):
            assert_close(out[row], expected[row])
        else:
            assert out[row].isnan().all(), "a row that nobody cut is another's to write"


def test_parts_must_fit() -> None:
    workspace = make_workspace(4, 4, 64, torch.device("cpu"))
    check_room(workspace, division_of([(0, 1), (1, 1)], torch.device("cpu")), 4, 64)
    with pytest.raises(AssertionError, match="the workspace has room for 4"):
        check_room(workspace, division_of([(0, 1)] * 3, torch.device("cpu")), 4, 64)
    with pytest.raises(AssertionError, match="heads differ"):
        check_room(workspace, division_of([(0, 1)], torch.device("cpu")), 8, 64)
