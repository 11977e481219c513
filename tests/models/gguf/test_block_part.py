"""Blocks of a file become plain elements in their places, in pieces of bounded size."""

from pathlib import Path

import pytest
import torch

from common.checkpoint.gguf.block_types import BlockType
from common.models.gguf.block_part import BlockPart
from common.models.loading import upload
from common.models.loading.upload import Upload
from common.models.quantization.groups import Groups

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
TYPE = BlockType("eight", 8, 9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)], ids=str)
@pytest.mark.parametrize("slot_bytes", [1, 64, 1 << 20])
def test_blocks_are_unpacked_into_their_places(
    device: str,
    dtype: torch.dtype,
    order: tuple[int, int, int],
    slot_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight elements a block, each a byte behind a byte that is added to all: rows of two blocks."""
    monkeypatch.setattr(upload, "SLOT_BYTES", slot_bytes)
    codes, added = torch.randint(100, (7, 5, 2, 8), dtype=torch.uint8), torch.randint(100, (7, 5, 2, 1))
    packed, path = torch.cat([added.to(torch.uint8), codes], -1), tmp_path / "a"
    path.write_bytes(b"\0\0\0" + packed.numpy().tobytes())
    shape = tuple((7, 5, 16)[each] for each in order)
    target = torch.zeros(shape, dtype=dtype, device=device)

    def unpack(read: torch.Tensor) -> Groups:
        return Groups(read[:, None, 1:].to(torch.int8), torch.ones_like(read[:, :1]).float(), read[:, :1].float())

    part = BlockPart(path, 3, TYPE, unpack, target.permute(order), 1.0)
    pieces = [*part.split(slot_bytes)]
    assert all(piece.num_bytes <= max(slot_bytes, TYPE.num_bytes) for piece in pieces)
    assert sum(piece.num_bytes for piece in pieces) == packed.numel() == part.num_bytes
    Upload([part], torch.device(device), lambda done, total: None).wait()
    expected = (codes.int() + added.int()).view(7, 5, 16).permute(order).to(dtype) + 1.0
    assert torch.equal(target.cpu(), expected)
