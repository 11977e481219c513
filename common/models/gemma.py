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


def layer_kinds(settings: Settings) -> list[str]:
    """Return the kind of each layer: as listed, or every sixth of full attention."""
    old = settings.count("sliding_window_pattern", MAX_LAYERS, PERIOD)
    period = settings.count("_sliding_window_pattern", MAX_LAYERS, old)
    count = settings.count("num_hidden_layers", MAX_LAYERS)
    every = [SLIDING if (number + 1) % period else FULL for number in range(count)]
    return settings.layer_kinds(*BASES) or every


def rope_of(settings: Settings, kind: str, head_dim: int) -> Rope:
    """Return the rotation of layers of a kind; raises ModelError for another scaling."""
    table = _rope_table(settings, kind)
    inner = Settings(table, f"{settings.where}, RoPE of {kind}")
    base = inner.positive_float("rope_theta", settings.positive_float(OLD_BASES[kind], BASES[kind]))
    frequencies, scaling = inverse_frequencies(base, head_dim), table.get("rope_type")
    if scaling == "proportional":
        turning = frequencies[: int(_share(inner) * len(frequencies))]
        return Rope(_slowed(turning, inner.positive_float("factor", 1.0)), is_leading=False)
    inner.refuse("partial_rotary_factor", 1.0)
    if scaling == "linear":
        return Rope(_slowed(frequencies, inner.positive_float("factor")))
    inner.refuse("rope_type", "default")
    return Rope(tuple(frequencies))


def _rope_table(settings: Settings, kind: str) -> JsonObject:
    """Return the rotary settings of a kind of layers; a scaling outside `rope_parameters` is of full attention."""
    tables = settings.values.get("rope_parameters") or {}
    if not isinstance(tables, dict) or not set(tables) <= set(BASES):
        raise ModelError(
            f"{settings.where}: rope_parameters = {tables!r:.200}, an object is needed, of {' and '.join(BASES)}"
        )
    values = {"rope_parameters": tables.get(kind), "rope_theta": settings.values.get(OLD_BASES[kind])}
    if kind == FULL:
        values["rope_scaling"] = settings.values.get("rope_scaling")
    return Settings(values, settings.where).rope_table()


def _slowed(frequencies: list[float], factor: float) -> tuple[float, ...]:
    return tuple(frequency / factor for frequency in frequencies)


def _share(settings: Settings) -> float:
    """Return the share of pairs that turn; a pair is an element of each half of a head."""
    share = settings.positive_float("partial_rotary_factor", 1.0)
    if share > 1.0:
        raise ModelError(f"{settings.where}: partial_rotary_factor = {share!r:.80}, at most 1 is needed")
    return share
