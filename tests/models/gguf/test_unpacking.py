"""Every type's blocks have the elements that ggml's own package gives, to the last bit; near misses do not."""

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from common.checkpoint.gguf.block_types import TYPES
from common.models.gguf import unpacking
from common.models.gguf.unpacking import PLAIN, UNPACKED, bad_block

HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Bytes of a block where a float16 begins; in other types at 0 alone."""


def legal_blocks(name: str, num_blocks: int = 50) -> np.ndarray:
    """Random bytes with moderate float16 numbers, of both signs."""
    generator = np.random.default_rng(len(name) + num_blocks)
    blocks = generator.integers(0, 256, (num_blocks, gguf.GGML_QUANT_SIZES[Type[name]][1]), dtype=np.uint8)
    for at in HALVES.get(name, (0,)):
        blocks[:, at : at + 2] = generator.normal(0, 0.1, (num_blocks, 1)).astype(np.float16).view(np.uint8)
    return blocks


def unpacked(name: str, blocks: np.ndarray) -> torch.Tensor:
    return UNPACKED[name](torch.from_numpy(blocks)).elements


def expected(name: str, blocks: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(blocks, Type[name]))


def test_types_are_those_of_the_package() -> None:
    for number, kind in TYPES.items():
        assert Type(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[Type(number)] == (kind.num_elements, kind.num_bytes)
    assert {kind.name for kind in TYPES.values()} == {*PLAIN, *UNPACKED}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", UNPACKED)
def test_elements_are_those_of_the_package(name: str, device: str) -> None:
    blocks = legal_blocks(name)
    found = UNPACKED[name](torch.from_numpy(blocks).to(device)).elements
    assert found.dtype == torch.float32
    assert torch.equal(found.cpu(), expected(name, blocks))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", UNPACKED)
def test_the_block_whose_elements_are_not_finite_is_found(name: str, value: float) -> None:
    """Each float16 of a block, and no other byte, makes an element endless."""
    [kind] = [kind for kind in TYPES.values() if kind.name == name]
    halves = HALVES.get(name, (0,))
    blocks = np.full((50, kind.num_bytes), 0xFF, np.uint8)
    for at in halves:
        blocks[:, at : at + 2] = np.array([65504], np.float16).view(np.uint8)
    assert expected(name, blocks).isfinite().all() and bad_block(torch.from_numpy(blocks.reshape(-1)), kind) is None
    for at in halves:
        wrong = blocks.copy()
        wrong[[7, 9], at : at + 2] = np.array([value], np.float16).view(np.uint8)
        with np.errstate(invalid="ignore"):
            assert not expected(name, wrong)[7].isfinite().all()
        assert bad_block(torch.from_numpy(wrong.reshape(-1)), kind) == 7


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_numbers_come_back(name: str) -> None:
    numbers = np.random.default_rng(0).normal(0, 1, (20, 64)).astype(np.float32)
    blocks = gguf.quants.quantize(numbers, Type[name])
    found = unpacked(name, blocks.reshape(-1, gguf.GGML_QUANT_SIZES[Type[name]][1])).view(20, 64)
    error = (found - torch.from_numpy(numbers)).square().mean().sqrt().item()
    bits = {"Q8_0": 8, "Q5_0": 5, "Q5_1": 5}.get(name, 4)
    assert error < 2.0 * 2**-bits


def swapped_nibbles(packed: torch.Tensor) -> torch.Tensor:
    return torch.cat([packed >> 4, packed & 0x0F], -1)


def alternating_nibbles(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack([packed & 0x0F, packed >> 4], -1).flatten(-2)


def changed(change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> object:
    whole = unpacking._scales_and_mins
    return lambda blocks: change(*whole(blocks))


MISSES: dict[str, tuple[str, object, tuple[str, ...]]] = {
    "nibbles swapped": ("_nibbles", swapped_nibbles, ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")),
    "nibbles alternate": ("_nibbles", alternating_nibbles, ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")),
    "scales in reverse": ("_scales_and_mins", changed(lambda s, m: (s.flip(1), m)), ("Q4_K", "Q5_K")),
    "scales and minimums swapped": ("_scales_and_mins", changed(lambda s, m: (m, s)), ("Q4_K", "Q5_K")),
    "the sign of minimums": ("_scales_and_mins", changed(lambda s, m: (s, -m)), ("Q4_K", "Q5_K")),
    "no fifth bits": ("_fifth_bits", lambda blocks, at: 0, ("Q5_0", "Q5_1")),
}


@pytest.mark.parametrize("miss", MISSES)
def test_a_near_miss_has_other_elements(miss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, function, types = MISSES[miss]
    monkeypatch.setattr(unpacking, name, function)
    for each in types:
        blocks = legal_blocks(each)
        assert not torch.equal(unpacked(each, blocks), expected(each, blocks)), each
