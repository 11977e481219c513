"""Resolution of a model's name, a directory or a Hugging Face Hub id, to a directory.

A directory holds config.json and the weights, or is a model's directory in a Hugging Face cache. Such a directory holds
snapshots: file names, as links to contents in `blobs`.
"""

import os
import re
from pathlib import Path

from common.base.errors import ConfigError, ModelError
from common.models.reading import read_config


def find_model(name: str) -> Path:
    """Return the local directory of `name`, downloaded first if `name` is a Hub id.

    Raises ConfigError without a directory or a reachable repository of this name.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return model_in(path)
    if not is_hub_id(name):
        raise ConfigError(f"{name!r} is neither a directory nor a Hub id of the form owner/name")
    # Imported here: the import takes most of a second, and a local directory does not need it.
    from deploy.serve.hub_download import download

    try:
        return download(name, hub_directory(name))
    except ConfigError as error:
        raise ConfigError(f"{error}; and there is no directory {name!r} here") from None


def model_in(path: Path) -> Path:
    """Return the directory of a model's files: `path` itself, or a snapshot inside; raises ConfigError."""
    config = path / "config.json"
    if config.is_file():
        return path
    if config.is_symlink():
        raise ConfigError(
            f"{config} is a link to {config.readlink()}, which is not there; of a Hugging Face cache name the "
            "directory models--OWNER--NAME, which has both"
        )
    snapshot = snapshot_in(path)
    if snapshot is None:
        raise ConfigError(f"{path} has no config.json; a model directory holds config.json and *.safetensors")
    return model_in(snapshot)


def snapshot_in(repository: Path) -> Path | None:
    """Return the snapshot of `main` in a model's cache directory, or the only snapshot."""
    main = repository / "refs" / "main"
    named = repository / "snapshots" / main.read_text().strip() if main.is_file() else None
    if named is not None and named.is_dir():
        return named
    snapshots = list(repository.glob("snapshots/*"))
    return snapshots[0] if len(snapshots) == 1 else None


def hub_directory(hub_id: str) -> Path:
    """Return the directory of a model in the Hugging Face cache, existing or not."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}"


def served_name(path: Path) -> str:
    """Return the name of a model for clients: the Hub id in a Hugging Face cache, else the directory's name."""
    names = Path(os.path.abspath(path)).parts
    repositories = [part for part in names[-3:] if part.startswith("models--")]
    return repositories[0].removeprefix("models--").replace("--", "/") if repositories else names[-1]


def is_hub_id(name: str) -> bool:
    """Tell whether `name` is written like a Hub id and is not a directory here."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and name[0] not in "./" and not Path(name).is_dir()


def weights_bytes(model_dir: Path) -> int:
    """Return about the size of a copy of the weights in memory: their size on disk, or 2 bytes an element if larger.

    Matrices of quantized checkpoints are made plain in memory.
    """
    on_disk = sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))
    try:
        config = read_config(model_dir)
    except ModelError:
        return on_disk  # a worker says what is wrong
    if config.quantization is None:
        return on_disk
    table = 0 if config.tied_embeddings else config.vocab_size * config.hidden_size
    return max(on_disk, 2 * (config.num_weights + table))
