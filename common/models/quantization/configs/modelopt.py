"""Reading of `quant_method` modelopt, as NVIDIA's Model Optimizer writes it. Needs no torch."""

from common.base.json_file import Json
from common.models.quantization.configs import fp8
from common.models.quantization.configs.tables import Table
from common.models.quantization.formats import FP8, Format, Scaled
from common.models.quantization.fp4 import Nvfp4
from common.models.quantization.rules import Match, Quantization, Rule

WILD = frozenset("*?[")
"""Characters that make a name one of many modules."""
MIXED = "MIXED_PRECISION"
"""Value of `quant_algo` where each module has its own."""
ALGORITHMS: dict[str, Format] = {
    "FP8": Scaled(FP8, 0, 0, input_bits=8),
    "FP8_PER_CHANNEL_PER_TOKEN": Scaled(FP8, 1, 0, input_bits=8),
    "NVFP4": Nvfp4(),
    "W4A16_NVFP4": Nvfp4(),
    "FP8_PB_WO": fp8.block_format(128, 128),
}
"""Formats by `quant_algo`."""


def read(table: Table) -> Quantization:
    """Return the formats; raises ModelError for settings that nobody reads."""
    excluded = [
        Rule(Match.WILDCARD if WILD & set(name) else Match.EXACT, name, None)
        for name in table.names("exclude_modules", "ignore")
    ]
    algorithm = str(table.get("quant_algo")).upper()
    rules = _of_each(table) if algorithm == MIXED else [Rule(Match.ALL, "", _format(table, algorithm))]
    has_cache = table.get("kv_cache_quant_algo", "kv_cache_scheme")
    return Quantization(table.where, "modelopt", (*excluded, *rules), input_bits=8, kv_cache=_cache(has_cache))


def _of_each(table: Table) -> list[Rule]:
    layers = table.table("quantized_layers")
    return [
        Rule(Match.EXACT, name, _format(layers.table(name), str(layers.table(name).get("quant_algo")).upper()))
        for name in layers.content
    ]


def _format(table: Table, algorithm: str) -> Format:
    if algorithm not in ALGORITHMS:
        table.refuse(f"quant_algo = {algorithm!r:.80} is", " or ".join((*ALGORITHMS, MIXED)))
    return ALGORITHMS[algorithm]


def _cache(named: Json) -> str:
    return "" if not named else named if isinstance(named, str) else "FP8"
