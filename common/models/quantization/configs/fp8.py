"""Reading of `quant_method` fp8: Qwen3-FP8, DeepSeek-V3, Ministral 3, and what transformers writes. Needs no torch."""

from common.models.quantization.configs.tables import Table
from common.models.quantization.formats import EXPONENTS, FLOATS, FP8, Scaled
from common.models.quantization.rules import Match, Quantization, Rule

SCALES = ("weight_scale_inv", "weight_scale")
"""Names of scales. All of them multiply, whatever the first says."""


def read(table: Table) -> Quantization:
    """Return the formats; raises ModelError for settings that nobody reads."""
    table.only("fmt", "e4m3", "float8_e4m3fn", default="e4m3")
    table.only("activation_scheme", "dynamic", "static", default="dynamic")
    block = table.block("weight_block_size")
    format_ = block_format(*block, input_bits=8) if block else Scaled(FP8, 0, 0, SCALES, input_bits=8)
    return Quantization(
        table.where,
        "fp8",
        (
            *table.unquantized(Match.PART, "modules_to_not_convert", "ignored_layers"),
            Rule(Match.ALL, "", format_),
        ),
        is_loose=True,
        input_bits=8,
    )


def block_format(rows: int, columns: int, *, input_bits: int = 16) -> Scaled:
    """Return FP8 in blocks; scales may be powers of 2 in a byte (`scale_fmt` ue8m0)."""
    return Scaled(FP8, rows, columns, SCALES, (*FLOATS, EXPONENTS[0]), input_bits=input_bits)
