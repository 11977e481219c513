"""Each format of quantized weights is found from the checkpoint alone, and gives the matrices that its packer means."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.base.dtypes import DTYPES
from common.models.loading.weights import load_weights, weights_layout
from common.models.quantization import packed_part
from common.models.reading import read_config
from tests.models.quantization.conftest import Written
from tests.support.marks import first_then
from tests.support.packed_checkpoints import CASES

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def load(directory: Path, device: str = "cpu", dtype: str = "float32") -> dict[str, torch.Tensor]:
    config = read_config(directory)
    layout = weights_layout(config.stacks(), DTYPES[dtype])
    region = torch.full((layout.num_bytes,), 0x7F, dtype=torch.uint8, device=device)
    load_weights(
        directory,
        layout,
        region,
        ignored=config.ignored,
        progress=lambda done, total: None,
        quantization=config.quantization,
    ).wait()
    return {name: tensor.cpu() for name, tensor in layout.tensors(region).items()}


def rounded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_weights_are_exactly_those_that_the_packer_means(
    case: str, device: str, written: Callable[[str], Written]
) -> None:
    """compressed-tensors rounds what it unpacks to bfloat16; all else is compared in fp32."""
    packed, plain = written(case)
    ours, expected = load(packed, device), load(plain)
    if "compressed" in case:
        ours, expected = rounded(ours), rounded(expected)
    assert [name for name, tensor in expected.items() if not torch.equal(ours[name], tensor)] == []


@pytest.mark.parametrize("case", first_then(pytest.mark.medium, CASES))
def test_rows_made_plain_a_few_at_a_time_are_the_same(
    case: str, written: Callable[[str], Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, _ = written(case)
    expected = load(packed, dtype="bfloat16")
    monkeypatch.setattr(packed_part, "MAX_ELEMENTS", 2048)
    ours = load(packed, dtype="bfloat16")
    assert [name for name, tensor in expected.items() if not torch.equal(ours[name], tensor)] == []
