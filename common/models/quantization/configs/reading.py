"""Reading of the formats of a checkpoint's matrices from its configuration. Needs no torch."""

import json
from collections.abc import Callable
from pathlib import Path

from common.base.errors import ModelError
from common.base.json_file import HF_QUANT_CONFIG, QUANT_CONFIG, QUANTIZATION_FILES, JsonObject
from common.models.quantization.configs import compressed_tensors, fp8, integers, modelopt
from common.models.quantization.configs.tables import Table
from common.models.quantization.rules import EXPRESSIONS, MAX_EXPRESSIONS, Quantization

KEYS = ("quantization_config", "compression_config")
"""Keys of config.json; the second of old compressed-tensors."""
READERS: dict[str, Callable[[Table], Quantization]] = {
    "fp8": fp8.read,
    "compressed-tensors": compressed_tensors.read,
    "modelopt": modelopt.read,
    "modelopt_fp4": modelopt.read,
    "awq": integers.read_awq,
    "gptq": integers.read_gptq,
    "marlin": integers.read_gptq,
}
"""Readers by `quant_method`."""


def read_quantization(values: JsonObject, where: str) -> Quantization | None:
    """Return what a config.json says of quantized matrices, None for nothing; raises ModelError for another format.

    Args:
        where: the file, for messages. A table out of a side file names its own.
    """
    for key in KEYS:
        if content := values.get(key):
            return _read(Table.of(content, str(values.get(f"{key}_from") or f"{where}: {key}")))
    return None


def _read(table: Table) -> Quantization:
    method = _method(table)
    if method not in READERS:
        named = [f"{name!r:.80}" for name in (table.get("quant_method"), table.get("format")) if name]
        table.refuse(f"weights in {' '.join(named) or f'{table.content!r:.80}'} are", f"{', '.join(READERS)}")
    quantization = READERS[method](table)
    num_expressions = sum(rule.match in EXPRESSIONS for rule in quantization.rules)
    if num_expressions > MAX_EXPRESSIONS:
        table.refuse(f"{num_expressions} expressions for names of modules are", f"{MAX_EXPRESSIONS} or fewer")
    return quantization


def _method(table: Table) -> str:
    """Return `quant_method`, or what files from before it were made by."""
    if named := table.get("quant_method"):
        return str(named).lower()
    if "config_groups" in table.content:
        return "compressed-tensors"
    if "quant_algo" in table.content:
        return "modelopt"
    if "w_bit" in table.content:
        return "awq"
    return "gptq" if "bits" in table.content and "group_size" in table.content else ""


def side_table(model_dir: Path) -> JsonObject:
    """Return what a file beside config.json adds to it: empty without such a file; raises ModelError for a bad one."""
    for name in QUANTIZATION_FILES:
        path = model_dir / name
        if path.is_file():
            content = _content(path)
            if name == HF_QUANT_CONFIG:
                content = {"quant_method": "modelopt"} | Table.of(content.get("quantization"), str(path)).content
            elif name == QUANT_CONFIG:
                content = {"quant_method": "awq"} | content
            return {KEYS[0]: content, f"{KEYS[0]}_from": str(path)}
    return {}


def _content(path: Path) -> JsonObject:
    try:
        return Table.of(json.loads(path.read_text(encoding="utf-8")), str(path)).content
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: {error}; fetch the model again") from None
