"""Room that the steps of all layers share is made once, however many threads compile kernels at a time."""

from threading import Thread
from typing import Any

import pytest
import torch

from common.kernels.base.gpu import Gpu
from common.ops.base import GroupCache


@pytest.mark.medium
@pytest.mark.parametrize(
    ("maker", "method"),
    [
        ("make_shared_parts", "shared_parts"),
        ("make_workspace", "parts"),
        ("make_query_parts", "query_parts"),
    ],
)
def test_it_is_made_once(maker: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from common.ops import workspaces

    make, made, found = getattr(workspaces, maker), [], []

    def noted(*its_args: Any) -> Any:
        made.append(make(*its_args))
        if len(made) == 1:
            other.start()
            other.join(0.5)  # it waits for what is being made here; else it makes another one meanwhile
        return made[0]

    monkeypatch.setattr(workspaces, maker, noted)
    monkeypatch.setattr(workspaces, "gpu_of", lambda device: Gpu("nowhere", (9, 0), 132, 227 << 10))
    pool = torch.empty((9, 1, 2, 16, 8, 128), dtype=torch.bfloat16, device="meta")
    ours = workspaces.Workspaces(GroupCache(pool, 8), 256)
    other = Thread(target=lambda: found.append(getattr(ours, method)()), daemon=True)
    found.append(getattr(ours, method)())
    other.join()
    assert len(made) == 1 and found[0] is found[1] is made[0]
