"""Plain matrices from the tensors of a quantized checkpoint: in fp32, on either device, exact where fp32 is."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from common.models.quantization.formats import Format, Scaled
from common.models.quantization.fp4 import Mxfp4, Nvfp4
from common.models.quantization.groups import Groups
from common.models.quantization.words import WORD_BITS, Awq, Gptq, Marlin, PackedRows

TYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8, "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
"""Types by their names in safetensors; an exponent of 8 bits is taken as a byte."""
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of codes of 4 bits; the lower half of a byte comes first."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Places in a word of AWQ at which eight rows stand, lowest bits first."""


def dequantize(format_: Format, tensors: Mapping[str, Tensor], num_rows: int, width: int) -> Tensor:
    """Return rows of a matrix: fp32 `[num_rows, width]`.

    Args:
        tensors: by the names of `Format.fields`, of these rows alone where the tensor can be cut, without those that
            are `needless`.
    """
    if isinstance(format_, Scaled):
        return _scaled(format_, tensors, num_rows, width)
    if isinstance(format_, Nvfp4 | Mxfp4):
        return _fp4(format_, tensors)
    codes, zeros, scales, groups = _integers(format_, tensors)
    if groups is None:
        each = width // scales.shape[1]
        rows: Tensor = codes.unflatten(1, (-1, each))
        return rows.sub_(zeros[..., None]).mul_(scales[..., None]).flatten(1)
    return codes.sub_(zeros[:, groups]).mul_(scales[:, groups])


def in_groups(format_: Format, tensors: Mapping[str, Tensor], num_rows: int, *, has_offsets: bool) -> Groups:
    """Return rows of a matrix of integers as they are stored; columns must be in order.

    Args:
        has_offsets: not all zeros are the middle code.
    """
    if isinstance(format_, Scaled):
        codes, scales = as_stored(format_, tensors, num_rows)
        grouped = codes.unflatten(1, (scales.shape[1], -1))
        zeros = tensors["weight_zero_point"].float().expand(scales.shape) if format_.has_zeros else None
        return Groups(grouped, scales, None if zeros is None else -zeros * scales)
    codes, zeros, scales, table = _integers(format_, tensors)
    assert table is None, "columns in order"
    scales, zeros = scales.expand(num_rows, -1), zeros.expand(num_rows, -1)
    is_byte = isinstance(format_, PackedRows | Gptq) and format_.bits == 8
    middle = 128.0 if is_byte else 0.0 if has_offsets else 8.0
    signed = codes.sub_(middle).to(torch.int8).unflatten(1, (scales.shape[1], -1))
    return Groups(signed, scales, (middle - zeros) * scales if has_offsets else None)


TABLE = "g_idx"
"""End of the name of a table with the group of each column."""
DIVISOR = "weight_global_scale"
"""Name of the scale that others are divided by."""


def as_stored(format_: Scaled, tensors: Mapping[str, Tensor], num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the codes of rows `[num_rows, width]`, and their scales in fp32, `[num_rows, 1 or blocks of columns]`."""
    scales = _numbers(tensors[format_.scales[0]])
    if format_.rows > 1:
        return tensors["weight"], scales.repeat_interleave(format_.rows, 0)[:num_rows]
    return tensors["weight"], scales.expand(num_rows, -1)


def problem(tensors: Mapping[str, Tensor], shape: tuple[int, int], first_row: int = 0) -> str:
    """Return what is wrong with tensors just read, in host memory, of a matrix of `shape`; "" for nothing.

    Args:
        first_row: of the matrix, from which on its codes were read.
    """
    for name, tensor in tensors.items():
        if name == "weight" and tensor.dtype == torch.float8_e4m3fn and not _is_finite(tensor):
            row = int((tensor.view(torch.uint8) & E4M3_NAN).amax(1).argmax()) + first_row
            return f"{name} has a code that is not a number in row {row}"
        if name == "weight_shape" and tensor.flatten().tolist() != list(shape):
            return f"{name} is {tensor.flatten().tolist()}, config.json says {list(shape)}"
        if name.endswith(TABLE) and (wrong := _wrong_groups(tensor, tensors)):
            return f"{name} has {wrong}"
        if "scale" in name and not _is_finite(tensor):
            return f"{name} has numbers that are not finite"
        if name == DIVISOR and not tensor.all():
            return f"{name} is 0, and divides"
    return ""


def needless(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tables, in host memory, of which neighbours have a group in common, as without the table."""
    return [name for name, tensor in tensors.items() if name.endswith(TABLE) and _has_neighbours(tensor, tensors)]


def _has_neighbours(columns: Tensor, tensors: Mapping[str, Tensor]) -> bool:
    columns, groups = columns.flatten(), _num_groups(tensors)
    width = columns.numel()
    if columns[0] < 0:
        return True
    return width % groups == 0 and torch.equal(columns, torch.arange(width) // (width // groups))


def _wrong_groups(columns: Tensor, tensors: Mapping[str, Tensor]) -> str:
    """Return the numbers that are no group; -1 for all columns means that there is no table."""
    groups = _num_groups(tensors)
    first, last = columns.min().item(), columns.max().item()
    if (first >= 0 and last < groups) or first == last == -1:
        return ""
    return f"groups of {first} to {last}, 0 to {groups - 1} is needed"


def _num_groups(tensors: Mapping[str, Tensor]) -> int:
    return tensors["scales"].shape[0] if "scales" in tensors else tensors["weight_scale"].shape[1]


def _is_finite(scales: Tensor) -> bool:
    """Tell whether all are numbers; of e4m3 the greatest byte tells it, a fiftieth of the time that fp32 takes."""
    if scales.dtype == torch.uint8:
        return not (scales == NO_EXPONENT).any()
    if scales.dtype == torch.float8_e4m3fn:
        return bool((scales.view(torch.uint8) & E4M3_NAN).max() < E4M3_NAN)
    return bool(scales.float().isfinite().all())


E4M3_NAN = 0x7F
"""Bits of the only code of e4m3 that is not a number, without the sign."""
NO_EXPONENT = 255
"""Exponent of 8 bits that means no number."""


def powers_of_2(exponents: Tensor) -> Tensor:
    """Return `2 ** (exponent - 127)` in fp32, of bytes; by bits, because this is exact for all of them."""
    bits = exponents.int() << 23
    return torch.where(exponents == 0, 1 << 22, bits).view(torch.float32)


def _scaled(format_: Scaled, tensors: Mapping[str, Tensor], num_rows: int, width: int) -> Tensor:
    codes, scales = tensors["weight"].float(), _numbers(tensors[format_.scales[0]])
    if format_.has_zeros:
        codes -= _expanded(tensors["weight_zero_point"].float(), format_, num_rows, width)
    return codes.mul_(_expanded(scales, format_, num_rows, width))


def _numbers(scales: Tensor) -> Tensor:
    return powers_of_2(scales) if scales.dtype == torch.uint8 else scales.float()


def _expanded(grid: Tensor, format_: Scaled, num_rows: int, width: int) -> Tensor:
    """Return the number of each element's block, in a shape that broadcasts to `[num_rows, width]`."""
    if grid.shape[1] > 1:
        grid = grid.repeat_interleave(format_.columns, 1)[:, :width]
    return grid.repeat_interleave(format_.rows, 0)[:num_rows] if 1 < grid.shape[0] < num_rows else grid


def _fp4(format_: Nvfp4 | Mxfp4, tensors: Mapping[str, Tensor]) -> Tensor:
    packed, scales = tensors[format_.codes], _numbers(tensors["weight_scale"])
    if isinstance(format_, Nvfp4):
        of_all = tensors[format_.matrix_scale]
        scales = scales / of_all if format_.divides else scales * of_all
    values = torch.tensor(FP4, device=packed.device)
    elements: Tensor = values[torch.stack((packed & 15, packed >> 4), -1).flatten(1).int()]
    groups: Tensor = elements.unflatten(1, (scales.shape[1], -1))
    return groups.mul_(scales[..., None]).flatten(1)


def _integers(format_: Format, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return codes `[num_rows, width]`, zeros and scales `[num_rows, groups]` in fp32, and the group of each column.

    Without groups of columns, neighbours have a group in common.
    """
    if isinstance(format_, PackedRows):
        return _packed_rows(format_, tensors)
    if isinstance(format_, Awq):
        codes, scales = _unpacked(tensors["qweight"], 4, AWQ_ORDER).float(), tensors["scales"].float()
        has_zeros = "qzeros" in tensors
        zeros = _unpacked(tensors["qzeros"], 4, AWQ_ORDER).float() if has_zeros else torch.full_like(scales, 8)
        return codes.t().contiguous(), zeros.t(), scales.t(), None
    if isinstance(format_, Gptq):
        codes = _unpacked(tensors["qweight"].t().contiguous(), format_.bits)
        zeros = _unpacked(tensors["qzeros"], format_.bits)
        zeros = (zeros + format_.less_one) & (2**format_.bits - 1)
        return codes.float(), zeros.t().float(), tensors["scales"].float().t(), _groups(tensors, "g_idx")
    if isinstance(format_, Marlin):
        return _marlin(format_, tensors)
    raise NotImplementedError(format_.label)


def _packed_rows(format_: PackedRows, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    codes, scales = _unpacked(tensors["weight_packed"], format_.bits).float(), tensors["weight_scale"].float()
    if format_.has_zeros:
        zeros = _unpacked(tensors["weight_zero_point"].t().contiguous(), format_.bits).t().float()
    else:
        zeros = torch.full_like(scales, 2 ** (format_.bits - 1))
    return codes, zeros, scales, _groups(tensors, "weight_g_idx")


def _groups(tensors: Mapping[str, Tensor], name: str) -> Tensor | None:
    """Return the group of each column; None where neighbours have a group in common."""
    return tensors[name][0].long() if name in tensors else None


def _unpacked(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Return the numbers in words `[rows, words]`, lowest bits first or in another order: int32 `[rows, numbers]`."""
    places = torch.tensor(order or range(WORD_BITS // bits), dtype=torch.int32, device=words.device) * bits
    numbers: Tensor = words[..., None] >> places & (2**bits - 1)
    return numbers.flatten(1)


def _marlin(format_: Marlin, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return codes out of tiles of 16 columns and 64 rows, whose 1024 codes the lanes of a warp hold.

    Lane `4 * row + pair` has a word for each 16 rows. A word has codes of two rows, 8 apart, and for each of them codes
    of two neighbouring columns and of those 8 further. Scales stand in the order in which lanes need them.
    """
    tiles = _unpacked(tensors["B"], 4, AWQ_ORDER).unflatten(1, (-1, 8, 4, 4, 2, 2, 2))
    # [tiles of columns, tiles of rows, row, pair, 16 rows, 8 rows, 8 columns, column of the pair]
    codes: Tensor = tiles.permute(1, 4, 5, 2, 0, 6, 3, 7).flatten(4).flatten(0, 3)
    lanes = (8, 8) if format_.group else (4, 4, 2)
    scales: Tensor = tensors["s"].unflatten(1, (-1, *lanes)).transpose(2, 3).flatten(1).float().t()
    return codes.float(), torch.full_like(scales, 8), scales, None
