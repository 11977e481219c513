"""Room that the steps of all layers share is made once, however many threads compile kernels at a time."""

from threading import Thread
from typing import Any

import pytest
import torch

from common.kernels.base.gpu import Gpu
from common.settings.config import KernelsSection


@pytest.mark.medium
@pytest.mark.parametrize(
    ("maker", "method", "args"),
    [
        ("make_shared_parts", "_shared_workspace", ()),
        ("make_workspace", "_parts_workspace", (8,)),
        ("make_query_parts", "_query_workspace", ()),
    ],
)
def test_it_is_made_once(maker: str, method: str, args: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    from common.ops import cuda_ops

    make, made, found = getattr(cuda_ops, maker), [], []

    def noted(*its_args: Any) -> Any:
        made.append(make(*its_args))
        if len(made) == 1:
            other.start()
            other.join(0.5)  # it waits for what is being made here; else it makes another one meanwhile
        return made[0]

    monkeypatch.setattr(cuda_ops, maker, noted)
    monkeypatch.setattr(cuda_ops, "gpu_of", lambda device: Gpu("nowhere", (9, 0), 132, 227 << 10))
    pool = torch.empty((9, 1, 2, 16, 8, 128), dtype=torch.bfloat16, device="meta")
    ops = cuda_ops.CudaOps(pool, KernelsSection(), 256)
    other = Thread(target=lambda: found.append(getattr(ops, method)(*args)), daemon=True)
    found.append(getattr(ops, method)(*args))
    other.join()
    assert len(made) == 1 and found[0] is found[1] is made[0]
