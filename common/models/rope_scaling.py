"""Rotary embedding beyond the trained context: YaRN (Peng et al., 2023), as config.json tells it. Needs no torch."""

import math
from typing import NamedTuple

from common.base.errors import ModelError
from common.base.json_file import JsonObject
from common.models.settings import Settings
from common.models.sizes.rope import QueryGrowth, Rope, inverse_frequencies
from common.settings.config import MAX_TOKENS


class Yarn(NamedTuple):
    """Stretching of contexts `factor` times: slow dimensions turn `factor` times slower, fast ones as before."""

    factor: float
    original: int  # trained positions
    beta_fast: float = 32.0  # turns within the trained positions, from which a dimension keeps its speed
    beta_slow: float = 1.0  # turns, up to which a dimension is slowed down in full
    truncate: bool = True  # the blended dimensions begin and end at whole numbers
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float = 0.0  # of cosines and sines; 0: from `factor`, `mscale` and `mscale_all_dim`

    @property
    def rope_factor(self) -> float:
        """Return the factor of cosines and sines."""
        if self.attention_factor:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return stretch(self.factor, self.mscale) / stretch(self.factor, self.mscale_all_dim)
        return stretch(self.factor)

    @property
    def score_factor(self) -> float:
        """Return the factor of scores, where a family has one: the square of a stretch."""
        return stretch(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def frequencies(self, base: float, dim: int) -> list[float]:
        """Return the rotary frequencies of `dim` dimensions, in radians a position: `[dim / 2]`."""
        low, high = self._blended(base, dim)
        slowed = [min(1.0, max(0.0, (i - low) / (high - low))) for i in range(dim // 2)]
        pairs = zip(inverse_frequencies(base, dim), slowed, strict=True)
        return [frequency / self.factor * share + frequency * (1.0 - share) for frequency, share in pairs]

    def _blended(self, base: float, dim: int) -> tuple[float, float]:
        """Return the last dimension that keeps its speed, and the first that is slowed down in full."""
        low, high = (self._dimension(turns, base, dim) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return low, high + 0.001 if low == high else high

    def _dimension(self, turns: float, base: float, dim: int) -> float:
        """Return the dimension that makes `turns` turns within the trained positions."""
        return dim * math.log(self.original / (turns * 2.0 * math.pi)) / (2.0 * math.log(base))


def stretch(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's `mscale`, by which attention is sharpened over longer contexts."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def read_yarn(settings: Settings, scaling: JsonObject) -> Yarn:
    """Return the settings of the scaling table; raises ModelError for numbers that give no frequencies."""
    table = Settings(scaling, f"{settings.where}: RoPE scaling")
    original = table.values.get("original_max_position_embeddings")
    positions = table if original is not None else settings
    key = "original_max_position_embeddings" if original is not None else "max_position_embeddings"
    truncate = table.values.get("truncate")
    return Yarn(
        factor=table.positive_float("factor"),
        original=positions.count(key, MAX_TOKENS),
        beta_fast=table.positive_float("beta_fast", 32.0),
        beta_slow=table.positive_float("beta_slow", 1.0),
        truncate=truncate is None or table.flag("truncate"),
        mscale=_number(table, "mscale"),
        mscale_all_dim=_number(table, "mscale_all_dim"),
        attention_factor=_number(table, "attention_factor"),
    )


def _number(table: Settings, key: str) -> float:
    """Return a positive number, or 0 where there is none."""
    return table.positive_float(key) if table.values.get(key) else 0.0


def read_growth(settings: Settings, scaling: JsonObject) -> QueryGrowth | None:
    """Return the growth of queries by `llama_4_scaling_beta`; None where there is none."""
    table = Settings(scaling, f"{settings.where}: RoPE scaling")
    rate = _number(table, "llama_4_scaling_beta")
    return QueryGrowth(rate, table.count("original_max_position_embeddings", MAX_TOKENS)) if rate else None


def plain_rope(settings: Settings, dim: int) -> Rope:
    """Return the rotation of `dim` dimensions; raises ModelError for any scaling."""
    base, scaling = settings.rope()
    _check_kind(settings, scaling, "default")
    return Rope(tuple(inverse_frequencies(base, dim)))


def yarn_rope(settings: Settings, dim: int) -> Rope:
    """Return the rotation of `dim` dimensions, plain or by YaRN; raises ModelError for another scaling."""
    base, scaling = settings.rope()
    kind = _check_kind(settings, scaling, "default", "yarn")
    return plain_rope(settings, dim) if kind == "default" else _scaled_by_yarn(settings, base, dim, scaling)


def score_factor(settings: Settings, scaling: JsonObject) -> float:
    """Return the factor of scores that YaRN asks for in families of latent attention; 1 without YaRN."""
    return read_yarn(settings, scaling).score_factor if scaling.get("rope_type") == "yarn" else 1.0


def _scaled_by_yarn(settings: Settings, base: float, dim: int, scaling: JsonObject) -> Rope:
    """Return the rotation of `dim` dimensions by YaRN; raises ModelError for numbers that give no frequencies."""
    yarn = read_yarn(settings, scaling)
    if base <= 1.0:
        raise ModelError(f"{settings.where}: rope_theta = {base!r:.80}, more than 1 is needed for YaRN")
    return Rope(tuple(yarn.frequencies(base, dim)), factor=yarn.rope_factor)


def _check_kind(settings: Settings, scaling: JsonObject, *supported: str) -> str:
    """Return the kind of scaling; raises ModelError for kinds that are not supported."""
    kind = scaling.get("rope_type", "default")
    if kind not in supported:
        model_type = settings.values.get("model_type")
        raise ModelError(f"{settings.where}: RoPE scaling {kind!r:.80} is not supported for {model_type}, remove it")
    return str(kind)
