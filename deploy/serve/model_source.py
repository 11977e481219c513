"""Resolution of a model's name to its files: a directory, a GGUF file, or what the Hugging Face Hub has.

A directory holds config.json and the weights, or a single model in GGUF, or is a model's directory in a Hugging Face
cache. Such a directory holds snapshots: file names, as links to contents in `blobs`.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple

from common.base.errors import ConfigError, ModelError
from common.checkpoint.gguf.model_file import is_gguf, model_name, parts_of
from common.models.forms import Forms
from common.models.held import sized_model
from common.models.reading import KEEP
from deploy.serve.gguf_choice import chosen, gguf_in

HUB_NAME = re.compile(
    r"(?P<repository>[\w.-]+/[\w.-]+)(?::(?P<kind>[\w.+/-]+)|/(?P<file>[\w.+/-]+\.gguf))?", re.IGNORECASE
)


class HubName(NamedTuple):
    """Model of the Hub: `owner/name`, in GGUF with a file's name, or the end of it such as Q4_K_M."""

    repository: str
    file: str = ""  # "" for a whole repository


def find_model(name: str) -> Path:
    """Return the local directory or GGUF file of `name`, downloaded first if `name` is of the Hub.

    Raises ConfigError without any of them, or without a reachable repository of this name.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return model_in(path)
    if is_gguf(path) and path.is_file():
        return parts_of(path)[0]
    if path.is_file():
        raise ConfigError(f"{path} is no model: the name of a GGUF file ends in .gguf; rename or link it")
    found = hub_name(name)
    if found is None:
        raise ConfigError(f"{name!r} is neither a directory nor a Hub id of the form owner/name, and no GGUF file")
    # Imported here: the import takes most of a second, and a local directory does not need it.
    from deploy.serve.hub_download import download, download_gguf

    repository = hub_directory(found.repository)
    try:
        if found.file:
            return download_gguf(found.repository, found.file, repository)
        return model_in(download(found.repository, repository))
    except ConfigError as error:
        raise ConfigError(f"{error}; and there is no directory {name!r} here") from None


def model_in(path: Path) -> Path:
    """Return a model's directory or GGUF file: `path` itself, or what is inside; raises ConfigError."""
    config = path / "config.json"
    has_plain = config.is_file() and any(path.glob("*.safetensors"))
    model = None if has_plain else gguf_in(path)
    if model is not None:
        return parts_of(model)[0]
    if config.is_file():
        return path
    if config.is_symlink():
        raise ConfigError(
            f"{config} is a link to {config.readlink()}, which is not there; of a Hugging Face cache name the "
            "directory models--OWNER--NAME, which has both"
        )
    snapshot = snapshot_in(path)
    if snapshot is None:
        raise ConfigError(
            f"{path} has no config.json; a model directory holds config.json and *.safetensors, or a GGUF file"
        )
    return model_in(snapshot)


def snapshot_in(repository: Path) -> Path | None:
    """Return the snapshot of `main` in a model's cache directory, or the only snapshot."""
    main = repository / "refs" / "main"
    named = repository / "snapshots" / main.read_text().strip() if main.is_file() else None
    if named is not None and named.is_dir():
        return named
    snapshots = list(repository.glob("snapshots/*"))
    return snapshots[0] if len(snapshots) == 1 else None


def names_in(repository: Path) -> list[str]:
    """Return the names of GGUF files in a model's cache directory, with their folders."""
    snapshot = snapshot_in(repository)
    return [] if snapshot is None else [str(path.relative_to(snapshot)) for path in snapshot.rglob("*.gguf")]


def cached_gguf(repository: Path, name: HubName) -> Path:
    """Return a GGUF file in a model's cache directory; raises ConfigError."""
    names, snapshot = names_in(repository), snapshot_in(repository)
    if snapshot is None or not names:
        raise ConfigError(f"{repository} holds no GGUF file; the service `model` downloads it")
    return parts_of(snapshot / chosen(names, name.file, name.repository))[0]


def hub_directory(hub_id: str) -> Path:
    """Return the directory of a model in the Hugging Face cache, existing or not."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}"


def served_name(path: Path, name: str = "") -> str:
    """Return the name of a model for clients: the Hub id in a Hugging Face cache, else that of directory or file.

    Args:
        name: what the user wrote; a name of the Hub with a file stays as it is.
    """
    if name and (found := hub_name(name)) is not None and found.file:
        return name
    path = Path(os.path.abspath(path))
    if is_gguf(path):
        return model_name(path)
    repositories = [part for part in path.parts[-3:] if part.startswith("models--")]
    return repositories[0].removeprefix("models--").replace("--", "/") if repositories else path.name


def hub_name(name: str) -> HubName | None:
    """Return the parts of a name that is written like one of the Hub, None for other names and those of files here."""
    found = HUB_NAME.fullmatch(name)
    if found is None or name[0] in "./" or Path(name).exists():
        return None
    file = found["kind"] or found["file"] or ""
    return None if not file and is_gguf(Path(name)) else HubName(found["repository"], file)


def weights_bytes(path: Path, forms: Forms, head: str = KEEP) -> int:
    """Return about the size of a copy of the weights in memory, on a device that holds them in these forms.

    Matrices of quantized checkpoints and of GGUF files count as they are held: by codes and scales, or by 2 bytes an
    element. Weights of other checkpoints take their size on disk, unless the choice of forms is a scheme.
    """
    on_disk = 0 if is_gguf(path) else sum(file.stat().st_size for file in path.glob("*.safetensors"))
    try:
        config = sized_model(path, forms, head)
    except ModelError:
        return on_disk  # a worker says what is wrong
    if config.quantization is None and not config.scheme and not config.head and not is_gguf(path):
        return on_disk
    return config.weight_bytes(2)
