"""Reading of `quant_method` compressed-tensors, as LLM Compressor writes it. Needs no torch."""

from common.models.quantization.configs.tables import Table
from common.models.quantization.formats import EXPONENTS, FP8, INT8, Format, Scaled
from common.models.quantization.fp4 import Mxfp4, Nvfp4
from common.models.quantization.rules import Match, Quantization, Rule
from common.models.quantization.words import PackedRows

REGEX = "re:"
"""Beginning of a name that is a regular expression."""
LINEAR = "Linear"
"""Class of all modules that have a matrix to multiply by; other classes have none here."""


def read(table: Table) -> Quantization:
    """Return the formats; raises ModelError for settings that nobody reads."""
    if table.get("transform_config"):
        table.refuse("transform_config, rotations of activations, is", "none")
    table.table("sparsity_config").only("format", "dense", None)
    groups = table.table("config_groups")
    if not groups.content:
        table.refuse("config_groups = {} is", "a group of modules or more")
    input_bits, rules = 16, list[tuple[int, Rule]]()
    for name in groups.content:
        group = groups.table(name)
        if group.get("output_activations"):
            group.refuse("output_activations are", "quantized weights and input_activations")
        if group.get("input_activations"):
            input_bits = min(input_bits, group.table("input_activations").whole("num_bits", default=8))
        format_ = _format(group, str(group.get("format") or table.get("format") or ""))
        rules += [_rule(table, target, format_) for target in group.names("targets")]
    ignored = [_rule(table, name, None)[1] for name in table.names("ignore")]
    by_precedence = [rule for _, rule in sorted(rules, key=lambda each: each[0])]
    kv_cache = "FP8" if table.get("kv_cache_scheme") else ""
    return Quantization(
        table.where, "compressed-tensors", (*ignored, *by_precedence), input_bits=input_bits, kv_cache=kv_cache
    )


def _rule(table: Table, text: str, format_: Format | None) -> tuple[int, Rule]:
    """Return the rule of a target, and its precedence: names, then expressions, then classes."""
    if text.startswith(REGEX):
        return 1, Rule(Match.REGEX, table.pattern(text.removeprefix(REGEX)), format_)
    if text == LINEAR and format_ is not None:
        return 2, Rule(Match.ALL, "", format_)
    return 0, Rule(Match.EXACT, text, format_)


def _format(group: Table, stored: str) -> Format:
    """Return the format of a group's weights."""
    weights = group.table("weights")
    bits, kind = weights.whole("num_bits"), weights.only("type", "int", "float", default="int")
    has_zeros = weights.only("symmetric", True, False, default=True) is False
    if (stored, bits) == ("mxfp8-quantized", 8):
        return Scaled(FP8, 1, 32, scale_types=EXPONENTS)
    named = stored if stored != "naive-quantized" else f"{kind}-quantized"
    if (named, kind) == ("int-quantized", "int") and bits <= 8:
        return Scaled(INT8, *_block(weights), has_zeros=has_zeros, input_bits=_input_bits(group, kind))
    if (named, kind, bits, has_zeros) == ("float-quantized", "float", 8, False):
        return Scaled(FP8, *_block(weights), input_bits=_input_bits(group, kind))
    if stored == "pack-quantized" and kind == "int" and bits in (4, 8):
        rows, group_size = _block(weights)
        if rows == 1 or (rows == 0 and not has_zeros):
            return PackedRows(bits, group_size, rows, has_zeros)
    if not has_zeros and (stored, kind, bits) == ("nvfp4-pack-quantized", "float", 4):
        return Nvfp4("weight_packed", "weight_global_scale", divides=True)
    if not has_zeros and (stored, kind, bits) == ("mxfp4-pack-quantized", "float", 4):
        return Mxfp4()
    return group.refuse(
        f"format {stored!r:.80} of weights in {kind} of {bits} bits is",
        "FP8 and INT8 (float-, int- and naive-quantized), INT4 and INT8 (pack-quantized), NVFP4, MXFP4 and MXFP8",
    )


def _input_bits(group: Table, kind: str) -> int:
    """Return 8 if activations are codes like the weights', with a scale of a token or of more; else 16."""
    if not group.get("input_activations"):
        return 16
    inputs = group.table("input_activations")
    is_symmetric = inputs.get("symmetric") is not False
    is_alike = (inputs.get("num_bits"), inputs.get("type", "int")) == (8, kind)
    has_scales = inputs.get("strategy") in ("tensor", "token", None) or (
        group.table("weights").get("strategy") == "block" and inputs.get("group_size") == 128
    )
    return 8 if is_symmetric and is_alike and has_scales else 16


def _block(weights: Table) -> tuple[int, int]:
    """Return the rows and columns that share a scale; 0 for all."""
    strategy = weights.only("strategy", "tensor", "channel", "block", "group", default="tensor")
    if strategy == "block":
        block = weights.block("block_structure")
        return block or weights.refuse("strategy = 'block' without block_structure is", "[rows, columns]")
    if strategy == "group":
        return 1, weights.group("group_size")
    return (1, 0) if strategy == "channel" else (0, 0)
