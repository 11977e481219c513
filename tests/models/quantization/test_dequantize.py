"""Matrices of any size that a format can have are made plain as their packers mean them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.models.quantization.dequantize import dequantize, needless, powers_of_2
from common.models.quantization.formats import FP8, INT8, ROWS, Format, Scaled
from common.models.quantization.fp4 import Nvfp4
from common.models.quantization.words import Awq, Gptq, Marlin, PackedRows
from tests.support import packers
from tests.support.packers import Packer

WHOLE = packers.fp8_whole("weight_scale", 1, 1)
FORMATS: dict[str, tuple[Format, Packer, int, int]] = {
    "fp8-blocks": (Scaled(FP8, 32, 32, ("weight_scale_inv",)), packers.fp8_blocks(size=32), 1, 1),
    "fp8-rows": (Scaled(FP8, 1, 0), packers.fp8_rows(1), 1, 1),
    "fp8-whole": (Scaled(FP8, 0, 0), WHOLE, 1, 1),
    "int8": (Scaled(INT8, 1, 0), packers.int8_rows, 1, 1),
    "packed": (PackedRows(4, 16, 1, True), packers.packed_rows(4, 16), 8, 16),
    "packed-scattered": (PackedRows(4, 16, 1, True), packers.packed_rows(4, 16, scattered=True), 8, 16),
    "packed-8": (PackedRows(8, 32, 1, True), packers.packed_rows(8, 32), 4, 32),
    "awq": (Awq(16), packers.awq(16), 8, 16),
    "awq-rows": (Awq(0), packers.awq(0), 8, 1),
    "gptq": (Gptq(4, 16), packers.gptq(4, 16), 8, 16),
    "gptq-v2": (Gptq(4, 32, less_one=False), packers.gptq(4, 32, version=2), 8, 32),
    "gptq-8": (Gptq(8, 16), packers.gptq(8, 16, scattered=True), 4, 16),
    "gptq-rows": (Gptq(4, 0), packers.gptq(4, 0), 8, 8),
    "marlin": (Marlin(16), packers.marlin(16), 64, 16),
    "marlin-rows": (Marlin(0), packers.marlin(0), 64, 16),
    "nvfp4": (Nvfp4(), packers.nvfp4, 1, 16),
}
"""Formats, their packers, and the numbers that their rows and widths are multiples of."""


@pytest.mark.parametrize("name", FORMATS)
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), seed=st.integers(0, 1000))
@settings(max_examples=15)
def test_matrices_of_any_size_are_what_their_packers_mean(name: str, rows: int, columns: int, seed: int) -> None:
    format_, pack, of_rows, of_columns = FORMATS[name]
    shape = rows * of_rows, columns * of_columns
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.1
    tensors, plain = pack(matrix)
    fields = format_.fields(*shape)
    assert all(tuple(tensors[field.name].shape) in (field.shape, *field.others) for field in fields)
    held = {field.name: tensors[field.name].reshape(field.shape) for field in fields}
    for table in needless(held):
        del held[table]
    found = dequantize(format_, held, *shape)
    assert found.shape == shape and torch.equal(found, plain)


@pytest.mark.parametrize("name", ["awq", "gptq", "marlin", "nvfp4"])
def test_a_size_that_a_format_cannot_have_is_refused_with_the_number_needed(name: str) -> None:
    format_, _, of_rows, of_columns = FORMATS[name]
    with pytest.raises(ValueError, match=rf"rows of {3 * of_columns + 1} elements, a multiple of .* is needed"):
        format_.fields(of_rows, 3 * of_columns + 1)
    if of_rows > 1:
        with pytest.raises(ValueError, match=rf"^{of_rows + 1} rows, a multiple of {of_rows} is needed"):
            format_.fields(of_rows + 1, of_columns)


def test_a_block_beyond_a_matrix_is_the_whole_matrix() -> None:
    """However large a configuration says that blocks are, they cost no memory."""
    tensors, plain = WHOLE(torch.randn(24, 40))
    huge = Scaled(FP8, 1 << 50, 1 << 50)
    assert [field.cut for field in huge.fields(24, 40)] == [ROWS, None]
    assert torch.equal(dequantize(huge, tensors, 24, 40), plain)


def test_every_exponent_of_8_bits_is_exact() -> None:
    exponents = torch.arange(255, dtype=torch.uint8)
    assert torch.equal(powers_of_2(exponents).double(), 2.0 ** (torch.arange(255).double() - 127.0))


def unpacked_by_package(name: str, tensors: dict[str, Tensor]) -> Tensor:
    """Convert with compressed-tensors, which reads others' formats, too, and have it make the result plain."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.entrypoints.convert.converters import autoawq, fp8block_dequantizer, modelopt_nvfp4
    from compressed_tensors.quantization import preset_name_to_scheme

    named = {f"a.{field}": tensor for field, tensor in tensors.items()}
    if name == "fp8-blocks":
        dequantized: dict[str, Tensor]
        dequantized = fp8block_dequantizer.FP8BlockDequantizer(["a.no"], ["Linear"], (32, 32), torch.float32).process(
            named
        )
        return dequantized["a.weight"]
    if name == "nvfp4":
        converted, preset = modelopt_nvfp4.ModelOptNvfp4Converter(targets=["re:a"]).process(named), "NVFP4A16"
    else:
        converted, preset = autoawq.AutoAWQConverter(group_size=16).process(named), "W4A16_ASYM"
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if preset == "W4A16_ASYM":
        scheme.weights = scheme.weights.model_copy(update={"group_size": 16})
    stored = "nvfp4-pack-quantized" if name == "nvfp4" else "pack-quantized"
    compressor = BaseCompressor.get_value_from_registry(stored)
    fields = {field.removeprefix("a."): tensor for field, tensor in converted.items()}
    plain_by_package: Tensor = compressor.decompress(fields, scheme)["weight"]
    return plain_by_package


@pytest.mark.parametrize("name", ["fp8-blocks", "awq", "nvfp4"])
def test_formats_of_others_are_read_as_compressed_tensors_reads_them(name: str) -> None:
    """The package rounds: AWQ's weights to float16, NVFP4's to bfloat16 after a division by the matrix's scale."""
    format_, pack, *_ = FORMATS[name]
    shape = 72, 80
    tensors, _ = pack(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    theirs = unpacked_by_package(name, dict(tensors))
    fields = format_.fields(*shape)
    ours = dequantize(format_, {field.name: tensors[field.name].reshape(field.shape) for field in fields}, *shape)
    if name == "nvfp4":
        assert torch.allclose(ours.to(theirs.dtype), theirs, rtol=2**-7, atol=0.0)
    else:
        assert torch.equal(ours.to(theirs.dtype), theirs)


def test_awq_without_zeros_is_symmetric() -> None:
    shape = 16, 32
    tensors, _ = packers.awq(16)(torch.randn(shape))
    fields = {field.name: tensors[field.name] for field in Awq(16, has_zeros=False).fields(*shape)}
    zeros = fields.pop("qzeros")
    assert torch.equal(
        dequantize(Awq(16, has_zeros=False), fields, *shape),
        dequantize(Awq(16), fields | {"qzeros": torch.full_like(zeros, -0x77777778)}, *shape),
    )
