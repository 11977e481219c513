"""Matrices written in the formats of quantized checkpoints, by the formats' definitions, element by element.

Each packer returns the tensors of a matrix by the names behind its module's, and the matrix that they mean in fp32.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]
Packer = Callable[[Tensor], Packed]

FP4_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def fp8_blocks(scale_type: torch.dtype = torch.float32, size: int = 128) -> Packer:
    """Square blocks, those at the edges smaller."""

    def pack(matrix: Tensor) -> Packed:
        rows, columns = matrix.shape
        grid = torch.zeros(-(-rows // size), -(-columns // size))
        codes, plain = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn), torch.zeros(rows, columns)
        for row in range(grid.shape[0]):
            for column in range(grid.shape[1]):
                at = (slice(row * size, (row + 1) * size), slice(column * size, (column + 1) * size))
                scale = (matrix[at].abs().max() / 448.0).to(scale_type).float()
                codes[at] = (matrix[at] / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
                plain[at] = codes[at].float() * scale
                grid[row, column] = scale
        return {"weight": codes, "weight_scale_inv": grid.to(scale_type)}, plain

    return pack


def fp8_rows(*shape: int) -> Packer:
    """A scale a row, in a shape of `[num_rows, *shape]`."""

    def pack(matrix: Tensor) -> Packed:
        scales = (matrix.abs().amax(1) / 448.0).bfloat16()
        codes = (matrix / scales.float()[:, None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        plain = torch.stack([row.float() * scale.float() for row, scale in zip(codes, scales, strict=True)])
        return {"weight": codes, "weight_scale": scales.view(-1, *shape)}, plain

    return pack


def fp8_whole(name: str, *shape: int, input_scale: str = "input_scale") -> Packer:
    """One scale, and one of the activations, which is not needed."""

    def pack(matrix: Tensor) -> Packed:
        scale = matrix.abs().max() / 448.0
        codes = (matrix / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        tensors = {"weight": codes, name: scale.view(shape), input_scale: torch.tensor(0.25).view(shape)}
        return tensors, codes.float() * scale

    return pack


def int8_rows(matrix: Tensor) -> Packed:
    """A scale a row, as SmoothQuant's checkpoints have it."""
    scales = (matrix.abs().amax(1) / 127.0).bfloat16()
    codes = (matrix / scales.float()[:, None]).round().clamp(-128, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scales[:, None]}, codes.float() * scales.float()[:, None]


def _integers(matrix: Tensor, bits: int, groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, zeros and scales of a matrix whose columns have groups, and what they mean; zeros and scales by group."""
    num_groups, most = int(groups.max()) + 1, 2**bits - 1
    low = torch.stack([matrix[:, groups == group].amin(1) for group in range(num_groups)], 1).clamp(max=0)
    high = torch.stack([matrix[:, groups == group].amax(1) for group in range(num_groups)], 1).clamp(min=0)
    scales = ((high - low) / most).half()
    zeros = (-low / scales.float()).round().clamp(0, most).int()
    codes = (matrix / scales.float()[:, groups] + zeros[:, groups]).round().clamp(0, most).int()
    return codes, zeros, scales, scales.float()[:, groups] * (codes - zeros[:, groups])


def _grouped(columns: int, group: int) -> Tensor:
    return torch.arange(columns) // (group or columns)


def _groups(columns: int, group: int, *, scattered: bool) -> Tensor:
    groups = _grouped(columns, group)
    return groups[torch.randperm(columns, generator=torch.Generator().manual_seed(0))] if scattered else groups


def _words(numbers: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """Neighbours along the last dimension in a word; number `order[i]` of each word stands at place `i`."""
    per_word = 32 // bits
    words = np.zeros((*numbers.shape[:-1], numbers.shape[-1] // per_word), dtype=np.uint32)
    array = numbers.numpy().astype(np.uint32)
    for place, number in enumerate(order or range(per_word)):
        words |= array[..., number::per_word] << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32).copy())


def packed_rows(bits: int, group: int, *, scattered: bool = False) -> Packer:
    """As compressed-tensors packs: a word has neighbouring inputs of an output; of zeros, neighbouring outputs."""

    def pack(matrix: Tensor) -> Packed:
        groups = _groups(matrix.shape[1], group, scattered=scattered)
        codes, zeros, scales, plain = _integers(matrix, bits, groups)
        tensors = {
            "weight_packed": _words(codes, bits),
            "weight_scale": scales,
            "weight_zero_point": _words(zeros.t().contiguous(), bits).t().contiguous(),
            "weight_shape": torch.tensor(matrix.shape),
            "weight_g_idx": groups.int() if scattered else torch.full_like(groups, -1).int(),
        }
        return tensors, plain

    return pack


def awq(group: int) -> Packer:
    """GEMM's layout: inputs are rows, and a word has eight outputs in an order of its own."""

    def pack(matrix: Tensor) -> Packed:
        codes, zeros, scales, plain = _integers(matrix, 4, _grouped(matrix.shape[1], group))
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        tensors = {
            "qweight": _words(codes.t().contiguous(), 4, order),
            "qzeros": _words(zeros.t().contiguous(), 4, order),
            "scales": scales.t().contiguous(),
        }
        return tensors, plain

    return pack


def gptq(bits: int, group: int, *, version: int = 1, scattered: bool = False) -> Packer:
    """A word has neighbouring inputs of an output; the first version stores zeros less one, modulo a code's size."""

    def pack(matrix: Tensor) -> Packed:
        groups = _groups(matrix.shape[1], group, scattered=scattered)
        codes, zeros, scales, plain = _integers(matrix, bits, groups)
        stored = (zeros - 1) % 2**bits if version == 1 else zeros
        tensors = {
            "qweight": _words(codes, bits).t().contiguous(),
            "qzeros": _words(stored.t().contiguous(), bits),
            "scales": scales.t().contiguous(),
            "g_idx": groups.int(),
        }
        return tensors, plain

    return pack


def marlin(group: int) -> Packer:
    """Marlin's layout, by the place of each code: what a lane of a warp needs stands together."""

    def pack(matrix: Tensor) -> Packed:
        num_rows, width = matrix.shape
        size = group or width
        scales = (matrix.view(num_rows, -1, size).abs().amax(2) / 7.0).half()
        spread = scales.float().repeat_interleave(size, 1)
        codes = (matrix / spread).round().clamp(-8, 7).int() + 8
        words = np.zeros((width // 16, 2 * num_rows), dtype=np.uint32)
        inverse = np.array([0, 4, 1, 5, 2, 6, 3, 7])
        row, column = np.indices((num_rows, width))
        lane = row % 8 * 4 + column % 8 // 2
        word = row // 64 * 128 + lane * 4 + row % 64 // 16
        number = row % 16 // 8 * 4 + column % 16 // 8 * 2 + column % 2
        shifted = codes.numpy().astype(np.uint32) << (4 * inverse[number]).astype(np.uint32)
        np.bitwise_or.at(words, (column // 16, word), shifted)
        if group:
            order = [lane + 8 * step for lane in range(8) for step in range(8)]
        else:
            order = [2 * lane + step for lane in range(4) for step in (0, 1, 8, 9, 16, 17, 24, 25)]
        stored = scales.t().reshape(-1, len(order))[:, order].reshape(-1, num_rows)
        tensors = {"B": torch.from_numpy(words.view(np.int32).copy()), "s": stored.contiguous()}
        return tensors, (codes - 8).float() * spread

    return pack


def nvfp4(matrix: Tensor) -> Packed:
    """As ModelOpt writes it: both scales multiply."""
    of_all = matrix.abs().max() / (6.0 * 448.0)
    groups = matrix.unflatten(1, (-1, 16))
    scales = (groups.abs().amax(2) / 6.0 / of_all).clamp(min=2**-6).to(torch.float8_e4m3fn)
    spread = (scales.float() * of_all)[..., None]
    magnitudes = torch.tensor(FP4_VALUES)
    codes = ((groups / spread).abs()[..., None] - magnitudes).abs().argmin(-1)
    plain = (magnitudes[codes] * groups.sign() * spread).flatten(1)
    codes = (codes + 8 * (groups < 0)).flatten(1)
    packed = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": of_all, "input_scale": torch.tensor(0.5)}
    return tensors, plain
