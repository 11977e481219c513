"""Rotary settings of config.json in every spelling in use, and the positions that follow from them."""

from typing import TypeGuard

from common.base.json_file import Json, JsonObject


def rotary_table(config: JsonObject) -> JsonObject:
    """Return the settings of `rope_scaling` and `rope_parameters`, with their kind as `rope_type`.

    A file with both keys has them once in the old spelling and once in the new. So a scaling prevails over a table
    without one. Raises ValueError for tables that contradict each other, and for other values than tables.
    """
    old, new = (_table(config, key) for key in ("rope_scaling", "rope_parameters"))
    if not old or not new:
        return old or new
    if "rope_theta" in new and config.get("rope_theta") is not None:
        old = {"rope_theta": config["rope_theta"]} | old
    if new.get("rope_type") == "default":
        new = {key: value for key, value in new.items() if key != "rope_type"}
    for key, value in old.items():
        if key in new and new[key] != value:
            raise ValueError(
                f"{key} = {value!r:.80} of rope_scaling, but {new[key]!r:.80} of rope_parameters; keep one table"
            )
    return new | old


def num_positions(config: JsonObject, most: int) -> int:
    """Return the positions of a model: those named, or those that YaRN stretches the trained ones to.

    Raises ValueError for numbers that are no positions, and for more than `most`.
    """
    named = _count(config, "max_position_embeddings", most)
    table = rotary_table(config)
    if table.get("rope_type") != "yarn":
        return named
    key = "original_max_position_embeddings"
    trained, factor = named if table.get(key) is None else _count(table, key, most), table.get("factor")
    if not is_positive(factor):
        raise ValueError(f"RoPE scaling: factor = {factor!r:.80}, a positive number is needed")
    stretched = int(factor * trained)
    if stretched > most:
        raise ValueError(f"RoPE scaling: factor = {factor!r:.80} of {trained} positions, at most {most} are possible")
    return max(named, stretched)


def is_positive(value: object) -> TypeGuard[int | float]:
    """Tell whether a JSON value is a number above 0 whose powers and quotients do not overflow.

    Python's parser lets NaN, Infinity and whole numbers of any length pass.
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and 1e-12 <= value <= 1e12


def _table(config: JsonObject, key: str) -> JsonObject:
    """Return a table with its kind as `rope_type` alone; empty if there is none."""
    table: Json = config.get(key) or {}
    if not isinstance(table, dict):
        raise ValueError(f"{key} = {table!r:.200}, an object is needed")
    others = {name: value for name, value in table.items() if name not in ("rope_type", "type")}
    kind = table.get("rope_type") or table.get("type")
    return others | {"rope_type": kind} if kind else others


def _count(table: JsonObject, key: str, most: int) -> int:
    value = table.get(key)
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{key} = {value!r:.80}, a whole number of 1 to {most} is needed")
    return value
