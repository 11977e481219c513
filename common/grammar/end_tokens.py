"""End tokens of a model: the router stops a text there, and grammars allow end tokens at the end of a text."""

from common.base.errors import ConfigError
from common.checkpoint.files import CONFIG, ModelFiles
from common.settings.config import MAX_TOKENS


def end_token_ids(files: ModelFiles) -> tuple[int, ...]:
    """Return the end token ids of a model; raises ConfigError for wrong ids."""
    value = files.end_ids()
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and 0 <= token_id <= MAX_TOKENS for token_id in ids):
        raise ConfigError(
            f"{files.where(CONFIG)}: eos_token_id = {value!r:.80}: wants an id of 0 to {MAX_TOKENS}, or a list"
        )
    return tuple(ids)
