"""Reading of Gemma's config.json: layers that see a window in turn with layers that see all, each with its RoPE."""

from common.base.errors import ModelError
from common.base.json_file import JsonObject
from common.models.settings import FULL, MAX_LAYERS, SLIDING, Settings
from common.models.sizes.rope import Rope, inverse_frequencies

PERIOD = 6
"""Layers from one that sees all to the next, by default."""
BASES = {FULL: 1_000_000.0, SLIDING: 10_000.0}
"""Rotary bases where config.json names none."""
OLD_BASES = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}
"""Names of rotary bases outside `rope_parameters`."""


def refuse_others(settings: Settings) -> None:
    """Raise ModelError for a setting that would change the computation of any Gemma."""
    settings.refuse("hidden_activation", "gelu_pytorch_tanh")
    settings.refuse("attention_bias", False)
    settings.refuse("quantization_config", None)


def layer_kinds(settings: Settings) -> list[str]:
    """Return the kind of each layer: as listed, or every sixth of full attention."""
    old = settings.count("sliding_window_pattern", MAX_LAYERS, PERIOD)
    period = settings.count("_sliding_window_pattern", MAX_LAYERS, old)
    count = settings.count("num_hidden_layers", MAX_LAYERS)
    every = [SLIDING if (number + 1) % period else FULL for number in range(count)]
    return settings.layer_kinds(*BASES) or every


def rope_of(settings: Settings, kind: str, head_dim: int) -> Rope:
    """Return the rotation of layers of a kind, from either spelling in use; raises ModelError for another scaling."""
    table = _rope_table(settings, kind)
    inner = Settings(table, f"{settings.where}, RoPE of {kind}")
    base = inner.positive_float("rope_theta", settings.positive_float(OLD_BASES[kind], BASES[kind]))
    frequencies, scaling = inverse_frequencies(base, head_dim), table.get("rope_type", table.get("type", "default"))
    if scaling == "linear":
        factor = inner.positive_float("factor")
        return Rope(tuple(frequency / factor for frequency in frequencies))
    if scaling == "proportional":
        return _proportional(inner, frequencies)
    inner.refuse("rope_type", "default", {"rope_type": scaling})
    inner.refuse("partial_rotary_factor", 1.0)
    return Rope(tuple(frequencies))


def _rope_table(settings: Settings, kind: str) -> JsonObject:
    """Return the rotary settings of a kind of layers; a scaling outside `rope_parameters` is of full attention."""
    tables = settings.values.get("rope_parameters") or {}
    scaling = settings.values.get("rope_scaling") or {}
    table = tables.get(kind) or {} if isinstance(tables, dict) else tables
    for name, value in (("rope_parameters", table), ("rope_scaling", scaling)):
        if not isinstance(value, dict):
            raise ModelError(f"{settings.where}: {name} = {value!r:.200}, an object is needed")
    return {**scaling, **table} if kind == FULL else table


def _proportional(settings: Settings, frequencies: list[float]) -> Rope:
    """Return frequencies of a whole head, of which the leading ones turn; a pair is an element of each half."""
    share = settings.positive_float("partial_rotary_factor", 1.0)
    if share > 1.0:
        raise ModelError(f"{settings.where}: partial_rotary_factor = {share!r:.80}, at most 1 is needed")
    return Rope(tuple(frequencies[: int(share * len(frequencies))]), is_leading=False)
