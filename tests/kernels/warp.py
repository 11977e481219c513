"""A warp that runs instructions of PTX on a CPU: those of inline assembly, lane by lane, and products of the warp.

Fragments of `mma.m16n8k16` are as the PTX ISA lays them out, with `g = lane // 4` and `t = lane % 4`. Of A, a thread
has rows `g` and `g + 8` of columns `2 * t`, `2 * t + 1` and 8 further on; of B, the same columns of token `g`. Of the
result it has rows `g` and `g + 8` of tokens `2 * t` and `2 * t + 1`.
"""

import re
import struct
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

LANES = 32
Registers = dict[str, Tensor]
"""Of each lane: 32 bits as int64, or numbers as fp64."""


def _halves(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return both numbers of 16 bits of each lane's register: fp64 `[LANES, 2]`."""
    return torch.stack((bits & 0xFFFF, bits >> 16), -1).to(torch.int32).to(torch.int16).view(dtype).double()


def _mma(dtype: torch.dtype, a: list[Tensor], b: list[Tensor], c: list[Tensor]) -> list[Tensor]:
    lanes = torch.arange(LANES)
    g, t = lanes // 4, lanes % 4
    matrix, tokens = torch.zeros(16, 16, dtype=torch.double), torch.zeros(16, 8, dtype=torch.double)
    for each in range(2):
        for register in range(4):
            columns = 2 * t + each + 8 * (register // 2)
            matrix[g + 8 * (register % 2), columns] = _halves(a[register], dtype)[:, each]
        for register in range(2):
            tokens[2 * t + each + 8 * register, g] = _halves(b[register], dtype)[:, each]
    products = matrix @ tokens
    return [c[i] + products[g + 8 * (i // 2), 2 * t + i % 2] for i in range(4)]


def run(code: str, num_outputs: int, inputs: list[Tensor], *, in_fp32: bool = False) -> list[Tensor]:
    """Return what instructions leave in outputs, which are operands 0 on, before the inputs, `[LANES]` each.

    Results in fp32 are exact to fp64, or with `in_fp32` rounded as a GPU rounds them.
    """

    def fp32(number: Tensor) -> Tensor:
        return number.float().double() if in_fp32 else number

    registers: Registers = {f"${num_outputs + i}": value for i, value in enumerate(inputs)}
    steps: dict[str, Callable[..., Tensor]] = {
        "mov.b32": lambda a: a,
        "mov.f32": lambda a: a,
        "shr.u32": lambda a, by: a >> by,
        "and.b32": lambda a, b: a & b,
        "xor.b32": lambda a, b: a ^ b,
        "mul.lo.u32": lambda a, b: a * b & 0xFFFFFFFF,
        "mad.lo.u32": lambda a, b, c: a * b + c & 0xFFFFFFFF,
        "prmt.b32": _bytes_of,
        "lop3.b32": lambda a, b, c, table: _and_or(a, b, c, table),
        "add.f32": lambda a, b: fp32(a + b),
        "mul.rn.f32": lambda a, b: fp32(_number(a) * _number(b)),
        "fma.rn.f32": lambda a, b, c: fp32(_number(a) * _number(b) + _number(c)),
        "fma.rn.bf16x2": lambda a, b, c: _fma(torch.bfloat16, a, b, c),
        "fma.rn.f16x2": lambda a, b, c: _fma(torch.float16, a, b, c),
        "cvt.rn.bf16x2.f32": lambda high, low: _pair(torch.bfloat16, high, low),
        "cvt.rn.f16x2.f32": lambda high, low: _pair(torch.float16, high, low),
    }

    def value(operand: str) -> Tensor:
        if operand.startswith("0f"):
            [number] = struct.unpack(">f", bytes.fromhex(operand[2:]))
            return torch.tensor(number, dtype=torch.double)
        return registers[operand] if operand in registers else torch.tensor(int(operand, 0))

    for line in code.split(";"):
        name, *rest = line.strip().lstrip("{").strip().split(maxsplit=1)
        if name.startswith("mma"):
            d, a, b, c = ([each.strip() for each in group.split(",")] for group in re.findall(r"{(.*?)}", rest[0]))
            dtype = torch.bfloat16 if ".bf16." in name else torch.float16
            assert name.startswith("mma.sync.aligned.m16n8k16.row.col.f32."), name
            results = _mma(dtype, *([value(each).expand(LANES) for each in group] for group in (a, b, c)))
            registers |= dict(zip(d, results, strict=True))
        elif name not in ("", "}", ".reg"):
            target, *operands = [each.strip() for each in rest[0].split(",")]
            registers[target] = steps[name](*map(value, operands))
    return [registers[f"${i}"] for i in range(num_outputs)]


def _number(register: Tensor) -> Tensor:
    """Return numbers of a register, which are held as its bits where integer instructions wrote it."""
    return register if register.is_floating_point() else register.to(torch.int32).view(torch.float32).double()


def _bytes_of(a: Tensor, b: Tensor, choice: Tensor) -> Tensor:
    """Return four bytes, chosen from those of `a`, then of `b`, by a number for each from the lowest on."""
    both = a | b << 32
    return sum(((both >> 8 * (choice >> 4 * i & 7)) & 0xFF) << 8 * i for i in range(4))  # type: ignore[return-value]


def _pair(dtype: torch.dtype, high: Tensor, low: Tensor) -> Tensor:
    """Return two numbers in a register, each rounded to 16 bits."""
    upper, lower = (each.float().to(dtype).view(torch.int16).long() & 0xFFFF for each in (high, low))
    return lower | upper << 16


def _and_or(a: Tensor, b: Tensor, c: Tensor, table: Tensor) -> Tensor:
    assert (table == 0xEA).all(), "a table other than (a & b) | c"
    return (a & b) | c


def _fma(dtype: torch.dtype, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return two numbers of 16 bits in a register, of two in each operand; every one is exact."""
    exact = _halves(a, dtype) * _halves(b, dtype) + _halves(c, dtype)
    rounded = exact.to(dtype)
    assert torch.equal(rounded.double(), exact), "a sum that 16 bits do not hold"
    low, high = (rounded.view(torch.int16).long() & 0xFFFF).unbind(-1)
    return low | high << 16


def held(of_registers: list[list[int]], of_lanes: list[list[int]], shape: list[int]) -> Tensor:
    """Return the places of a tensor's elements that lanes hold, by bases of a layout: `[LANES, registers]`."""
    places = torch.empty(LANES, 1 << len(of_registers), dtype=torch.long)
    numbers = torch.arange(torch.Size(shape).numel())
    for lane, register in product(range(LANES), range(places.shape[1])):
        index = torch.zeros(len(shape), dtype=torch.long)
        for number, bases in ((register, of_registers), (lane, of_lanes)):
            for bit, base in enumerate(bases):
                index ^= torch.tensor(base) * (number >> bit & 1)
        places[lane, register] = numbers.view(shape)[tuple(index)]
    return places
