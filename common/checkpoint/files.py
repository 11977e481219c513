"""Contents of a model's files by their role, from a directory or a GGUF file."""

from pathlib import Path

from common.base.errors import ConfigError
from common.base.json_file import Json, JsonObject, read_json, text_fields
from common.checkpoint.gguf.config import config_of
from common.checkpoint.gguf.model_file import is_gguf, parts_of, read_gguf
from common.checkpoint.gguf.special_tokens import end_ids_of, tokenizer_config_of
from common.checkpoint.gguf.tokenizer import tokenizer_json_of

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"


def require_model(path: Path) -> None:
    """Raise ConfigError when there is no model, or not all parts of a file; programs call before any other work."""
    if is_gguf(path):
        parts_of(path)
    if not place_of(path, CONFIG).is_file():
        raise ConfigError(
            f"model.path = {path}: no directory with a model's config.json, and no GGUF file; name one with "
            "--model-path, and for a container mount it there"
        )


def place_of(path: Path, name: str) -> Path:
    """Return the file with the contents of `name`, for errors: a GGUF file has the contents of all files."""
    return path if is_gguf(path) else path / name


def read_config_json(path: Path) -> JsonObject:
    """Return config.json, or a GGUF file's metadata in its keys; raises ConfigError for an unreadable file."""
    return config_of(read_gguf(path)) if is_gguf(path) else read_json(path / CONFIG)


def read_text_config(path: Path) -> JsonObject:
    """Return the fields of `read_config_json` about text."""
    return text_fields(read_config_json(path))


def read_end_ids(path: Path) -> Json:
    """Return `eos_token_id`, an id or a list of ids, None without any; raises ConfigError for an unreadable file.

    generation_config.json comes first, because config.json often lists only a single end token of several.
    """
    if is_gguf(path):
        return end_ids_of(read_gguf(path))
    generation = path / GENERATION_CONFIG
    value = read_json(generation).get("eos_token_id") if generation.exists() else None
    return read_text_config(path).get("eos_token_id") if value is None else value


def read_tokenizer_json(path: Path) -> str:
    """Return the text of tokenizer.json; raises ConfigError without such a file."""
    if is_gguf(path):
        return tokenizer_json_of(read_gguf(path))
    file = path / TOKENIZER
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; a model directory needs {TOKENIZER}") from None
    except ValueError as error:
        raise ConfigError(f"{file}: {error}; fetch the model's own {TOKENIZER} again") from None


def read_tokenizer_config(path: Path) -> JsonObject:
    """Return tokenizer_config.json, empty without one."""
    if is_gguf(path):
        return tokenizer_config_of(read_gguf(path))
    file = path / TOKENIZER_CONFIG
    return read_json(file) if file.exists() else {}


def read_chat_template(path: Path) -> str | None:
    """Return the file of a chat template; None without one. Raises ConfigError for an unreadable file."""
    file = path / TEMPLATE
    try:
        return None if is_gguf(path) or not file.exists() else file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}; fetch the model's own again") from None
