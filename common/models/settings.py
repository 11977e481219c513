"""Typed look-ups in config.json, whose errors name the key, the value and the values accepted."""

from pathlib import Path

from common.base.errors import ConfigError, ModelError
from common.base.json_file import JsonObject, text_fields
from common.base.rotary import is_positive, num_positions, rotary_table
from common.checkpoint.files import CONFIG, open_model
from common.checkpoint.gguf.model_file import is_gguf
from common.models.quantization.configs.reading import KEYS, side_table
from common.settings.config import MAX_TOKENS

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
"""Kinds of layers, as config.json lists them."""
MAX_LAYERS = 1 << 12
MAX_HEADS = 1 << 12
MAX_EXPERTS = 1 << 12
MAX_HEAD_DIM = 1 << 12
MAX_WIDTH = 1 << 24
"""Elements of a layer's width, or tokens of the vocabulary."""


class Settings:
    """Contents of a config.json, or metadata in its keys; `where` is the file's path, for errors."""

    def __init__(self, values: JsonObject, where: str) -> None:
        self.values = values
        self.where = where

    @staticmethod
    def read(path: Path) -> "Settings":
        """Return the settings of a model directory or a GGUF file; raises ModelError for an unreadable file."""
        try:
            files = open_model(path)
            values = files.config()
        except ConfigError as error:
            raise ModelError(str(error)) from None
        if not is_gguf(path) and not any(values.get(key) for key in KEYS):
            values |= side_table(path)
        return Settings(values, str(files.where(CONFIG)))

    def completed(self, left_out: JsonObject) -> "Settings":
        """Return settings with the values of `left_out` for keys that are absent or null."""
        named = {key: value for key, value in self.values.items() if value is not None}
        return Settings(left_out | named, self.where)

    def count(self, key: str, most: int, default: int | None = None) -> int:
        """Return a whole number of 1 to `most`; raises ModelError beyond, because no model is as large."""
        value = self.values.get(key)
        if value is None and default is not None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise ModelError(f"{self.where}: {key} = {value!r:.80}, a whole number of 1 to {most} is needed")
        return value

    def multiple(self, key: str, of: int, most: int) -> int:
        """Return a whole number of 1 to `most`; raises ModelError also if it is no multiple of `of`."""
        value = self.count(key, most)
        if value % of:
            raise ModelError(f"{self.where}: {key} = {value}, a multiple of {of} is needed; serve another checkpoint")
        return value

    def even(self, key: str, most: int) -> int:
        """Return an even number of 2 to `most`."""
        value = self.count(key, most)
        if value % 2:
            raise ModelError(f"{self.where}: {key} = {value}, an even number is needed: RoPE rotates pairs")
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not is_positive(value):
            raise ModelError(f"{self.where}: {key} = {value!r:.80}, a positive number is needed")
        return float(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise ModelError(f"{self.where}: {key} = {value!r:.80}, true or false is needed")
        return default if value is None else value

    def refuse(self, key: str, wanted: object, table: JsonObject | None = None) -> None:
        """Raise ModelError unless `key` is absent, null or `wanted`: another value would change the computation.

        `table`: where to look, config.json itself by default.
        """
        value = (self.values if table is None else table).get(key)
        if value is not None and value != wanted:
            shown = f"{value!r:.200}"
            raise ModelError(
                f"{self.where}: {key} = {shown} is not supported, only {wanted!r}; serve another checkpoint"
            )

    @property
    def is_quantized(self) -> bool:
        """Tell whether config.json names a format of packed weights."""
        return any(self.values.get(key) for key in KEYS)

    def quantization(self, *supported: str) -> str | None:
        """Return the format of weights that a family keeps packed; raises ModelError unless it is `supported`."""
        key, table = next(((key, self.values[key]) for key in KEYS if self.values.get(key)), ("", None))
        if table is None:
            return None
        named = table if isinstance(table, dict) else {}
        if named.get("quant_method") in supported:
            return str(named["quant_method"])
        names = [f"{named[name]!r:.80}" for name in ("quant_method", "format", "quant_algo") if named.get(name)]
        raise ModelError(
            f"{self.where}: {key}: weights in {' '.join(names) or f'{table!r:.80}'} are not supported, because no "
            f"kernel multiplies by them; serve a checkpoint of this model in {' or '.join(('16 bits', *supported))}"
        )

    def window(self) -> int:
        """Return the tokens seen by a token, itself included; 0 where a token sees all."""
        return 0 if self.values.get("sliding_window") is None else self.count("sliding_window", MAX_TOKENS)

    def layer_kinds(self, *known: str) -> list[str] | None:
        """Return the kind of each layer as listed; None without a list. Raises ModelError for kinds not `known`."""
        kinds, count = self.values.get("layer_types"), self.count("num_hidden_layers", MAX_LAYERS)
        if kinds is None:
            return None
        if not isinstance(kinds, list) or len(kinds) != count or not set(map(str, kinds)) <= set(known):
            raise ModelError(
                f"{self.where}: layer_types = {kinds!r:.200}, {count} of {', '.join(sorted(known))} are needed"
            )
        return kinds

    def refuse_other_layers(self) -> None:
        """Raise ModelError if config.json names layers that do not attend to the whole context."""
        kinds = self.values.get("layer_types")
        if kinds is None:
            return
        others = sorted({str(kind) for kind in kinds} - {FULL}) if isinstance(kinds, list) else [repr(kinds)]
        if others:
            raise ModelError(
                f"{self.where}: layer_types has {', '.join(others):.200}, only {FULL!r} is supported; "
                "serve another checkpoint"
            )

    def head_dim(self, hidden_size: int, num_q_heads: int) -> int:
        """Return the size of a head, by default an equal share of the hidden size."""
        if self.values.get("head_dim") is None and hidden_size % num_q_heads:
            raise ModelError(
                f"{self.where}: hidden_size = {hidden_size} cannot be divided among {num_q_heads} heads; "
                "add the head_dim that the weights have"
            )
        head_dim = self.count("head_dim", MAX_HEAD_DIM, hidden_size // num_q_heads)
        if head_dim % 2:
            raise ModelError(f"{self.where}: head_dim = {head_dim}, an even number is needed: RoPE rotates pairs")
        return head_dim

    def max_positions(self) -> int:
        """Return the positions of the model, those that YaRN adds included."""
        try:
            return num_positions(self.values, MAX_TOKENS)
        except ValueError as error:
            raise ModelError(f"{self.where}: {error}") from None

    def rope_table(self) -> JsonObject:
        """Return the rotary settings of all layers, with their kind as `rope_type`; empty where there are none."""
        try:
            table = rotary_table(self.values)
        except ValueError as error:
            raise ModelError(f"{self.where}: {error}") from None
        for kind in (FULL, SLIDING):
            self.refuse(kind, None, table)
        return table

    def require_rope_table(self) -> None:
        """Raise ModelError without rotary settings, in families that scale by default."""
        if not self.rope_table():
            raise ModelError(f"{self.where}: rope_parameters are left out; fetch the model again")

    def rope(self) -> tuple[float, JsonObject]:
        """Return the rotary base and the table of rotary settings."""
        table = self.rope_table()
        for place in (self.values, table):
            self.refuse("partial_rotary_factor", 1.0, place)
        base = table.get("rope_theta", self.values.get("rope_theta", 10000.0))
        if not is_positive(base):
            raise ModelError(f"{self.where}: rope_theta = {base!r:.80}, a positive number is needed")
        return float(base), table

    def partial_rope(self) -> tuple[float, float]:
        """Return the rotary base, and the share of a head's dimensions that turns; raises ModelError for a scaling."""
        table = self.rope_table()
        self.refuse("rope_type", "default", table)
        inner = Settings({**self.values, **table}, self.where)
        base, share = inner.positive_float("rope_theta"), inner.positive_float("partial_rotary_factor", 1.0)
        if share > 1.0:
            raise ModelError(f"{self.where}: partial_rotary_factor = {share!r:.80}, at most 1 is needed")
        return base, share

    def text(self) -> "Settings":
        """Return the settings of the text model inside a model of several senses."""
        inner = self.values.get("text_config")
        if not isinstance(inner, dict):
            raise ModelError(f"{self.where}: text_config = {inner!r:.80}, an object is needed")
        return Settings(text_fields(self.values), f"{self.where}, text_config")

    def dtype(self) -> str:
        """Return the checkpoint's dtype; bfloat16 if config.json names none."""
        return str(self.values.get("dtype") or self.values.get("torch_dtype") or "bfloat16")
