"""Contents of a model's files by their role, from a directory or a GGUF file."""

from pathlib import Path
from typing import Protocol

from common.base.errors import ConfigError
from common.base.json_file import Json, JsonObject, read_json, text_fields
from common.checkpoint.gguf.config import config_of
from common.checkpoint.gguf.model_file import is_gguf, parts_of, read_gguf
from common.checkpoint.gguf.special_tokens import end_ids_of, tokenizer_config_of
from common.checkpoint.gguf.tokenizer import tokenizer_json_of

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"


class ModelFiles(Protocol):
    """Contents of a model's files; each method raises ConfigError for an unreadable file."""

    def where(self, name: str) -> Path:
        """Return the file with the contents of `name`, for errors."""
        ...

    def config(self) -> JsonObject:
        """Return config.json, or metadata in its keys."""
        ...

    def end_ids(self) -> Json:
        """Return `eos_token_id`: an id, a list of ids, or None."""
        ...

    def tokenizer(self) -> str:
        """Return the text of tokenizer.json; raises ConfigError without such a file."""
        ...

    def tokenizer_config(self) -> JsonObject:
        """Return tokenizer_config.json, empty without one."""
        ...

    def template(self) -> str | None:
        """Return a chat template that has a file of its own; None without one."""
        ...


def open_model(path: Path) -> ModelFiles:
    """Return the files of a model; raises ConfigError for a GGUF file that cannot be read."""
    return GGUFFiles(path) if is_gguf(path) else DirectoryFiles(path)


def require_model(path: Path) -> None:
    """Raise ConfigError when there is no model, or not all parts of a file; programs call before any other work."""
    if is_gguf(path):
        parts_of(path)
    if not (path if is_gguf(path) else path / CONFIG).is_file():
        raise ConfigError(
            f"model.path = {path}: no directory with a model's config.json, and no GGUF file; name one with "
            "--model-path, and for a container mount it there"
        )


def text_config(files: ModelFiles) -> JsonObject:
    """Return the fields of config.json about text."""
    return text_fields(files.config())


class DirectoryFiles:
    """Files of a directory in Hugging Face's layout."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def where(self, name: str) -> Path:
        return self._path / name

    def config(self) -> JsonObject:
        return read_json(self._path / CONFIG)

    def end_ids(self) -> Json:
        """Return those of generation_config.json first, because config.json often lists only one of several."""
        generation = self._path / GENERATION_CONFIG
        value = read_json(generation).get("eos_token_id") if generation.exists() else None
        return text_config(self).get("eos_token_id") if value is None else value

    def tokenizer(self) -> str:
        file = self._path / TOKENIZER
        try:
            return file.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}; a model directory needs {TOKENIZER}") from None
        except ValueError as error:
            raise ConfigError(f"{file}: {error}; fetch the model's own {TOKENIZER} again") from None

    def tokenizer_config(self) -> JsonObject:
        file = self._path / TOKENIZER_CONFIG
        return read_json(file) if file.exists() else {}

    def template(self) -> str | None:
        file = self._path / TEMPLATE
        try:
            return file.read_text(encoding="utf-8") if file.exists() else None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: {error}; fetch the model's own again") from None


class GGUFFiles:
    """Contents of a GGUF file, whose header is read once."""

    def __init__(self, path: Path) -> None:
        self._path, self._model = path, read_gguf(path)

    def where(self, name: str) -> Path:
        return self._path

    def config(self) -> JsonObject:
        return config_of(self._model)

    def end_ids(self) -> Json:
        return end_ids_of(self._model)

    def tokenizer(self) -> str:
        return tokenizer_json_of(self._model)

    def tokenizer_config(self) -> JsonObject:
        return tokenizer_config_of(self._model)

    def template(self) -> str | None:
        return None  # it is in the tokenizer's configuration
