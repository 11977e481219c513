"""End tokens of a model: the router stops a text there, and grammars allow end tokens at the end of a text."""

from pathlib import Path

from common.base.errors import ConfigError
from common.base.json_file import read_json, read_text_config
from common.settings.config import MAX_TOKENS


def end_token_ids(path: Path) -> tuple[int, ...]:
    """Return the end token ids of the model in directory `path`; raises ConfigError for wrong ids.

    generation_config.json comes first, because config.json often lists only a single end token of several.
    """
    generation = path / "generation_config.json"
    value = read_json(generation).get("eos_token_id") if generation.exists() else None
    if value is None:
        value = read_text_config(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and 0 <= token_id <= MAX_TOKENS for token_id in ids):
        raise ConfigError(f"{path}: eos_token_id = {value!r:.80}: wants an id of 0 to {MAX_TOKENS}, or a list of such")
    return tuple(ids)
