"""Reading of `quant_method` awq, gptq and marlin, and of older files of these formats. Needs no torch."""

from common.base.json_file import JsonObject
from common.models.quantization.configs.tables import Table
from common.models.quantization.formats import Format
from common.models.quantization.rules import Match, Quantization, Rule
from common.models.quantization.words import Awq, Gptq, Marlin

SKIPPED, CHANGED = "-:", "+:"
"""Beginnings of expressions of `dynamic`: modules that are not quantized, and those with settings of their own."""


def read_awq(table: Table) -> Quantization:
    """Return the formats; raises ModelError for settings that nobody reads."""
    version = str(table.get("version", "checkpoint_format", "format") or "gemm").lower()
    if version != "gemm":
        table.refuse(f"version = {version!r:.80} of AWQ is", "'gemm'")
    table.only("pack_dtype", "int32", None)
    if (bits := table.whole("bits", "w_bit", default=4)) != 4:
        table.refuse(f"bits = {bits} of AWQ is", "4")
    has_zeros = table.only("zero_point", True, False, default=True)
    format_ = Awq(table.group("group_size", "q_group_size", default=128), bool(has_zeros))
    return Quantization(table.where, "awq", (Rule(Match.ALL, "", format_),), is_loose=True)


def read_gptq(table: Table) -> Quantization:
    """Return the formats; raises ModelError for settings that nobody reads."""
    rules = []
    for text, changes in table.table("dynamic").content.items():
        expression = table.pattern(text.removeprefix(SKIPPED).removeprefix(CHANGED))
        own = None if text.startswith(SKIPPED) else _gptq(Table(table.content | _changes(table, changes), table.where))
        rules.append(Rule(Match.REGEX, expression, own))
    return Quantization(table.where, "gptq", (*rules, Rule(Match.ALL, "", _gptq(table))), is_loose=True)


def _changes(table: Table, changes: object) -> JsonObject:
    return Table.of(changes or {}, f"{table.where}: dynamic").content


def _gptq(table: Table) -> Format:
    bits, group = table.whole("bits"), table.group("group_size")
    if bits not in (4, 8):
        table.refuse(f"bits = {bits} of GPTQ is", "4 or 8")
    table.only("pack_dtype", "int32", None)
    version = str(table.get("checkpoint_format", "format") or "gptq").lower()
    is_marlin = version == "marlin" or table.get("is_marlin_format") or table.get("quant_method") == "marlin"
    if is_marlin:
        return Marlin(group) if bits == 4 else table.refuse(f"bits = {bits} of Marlin is", "4")
    if version not in ("gptq", "gptq_v2"):
        table.refuse(f"checkpoint_format = {version!r:.80} is", "'gptq', 'gptq_v2' or 'marlin'")
    return Gptq(bits, group, less_one=version == "gptq")
