"""Turns what the user calls the model, a directory or a Hugging Face Hub id, into a directory."""

import re
from pathlib import Path

from common.errors import ConfigError

WANTED = ["*.json", "*.safetensors", "tokenizer*", "chat_template.jinja", "merges.txt", "vocab.txt"]
UNWANTED = ["original/*", "consolidated*", "*/*"]  # second copies of the weights in other layouts


def find_model(name: str) -> Path:
    """The local directory of `name`, downloaded first if it is a Hub id.

    Raises ConfigError when there is neither a directory nor a reachable repository of that name.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path} has no config.json; a model directory holds config.json and *.safetensors")
        return path
    if not is_hub_id(name):
        raise ConfigError(f"{name!r} is neither a directory nor a Hub id of the form owner/name")
    return _download(name)


def is_hub_id(name: str) -> bool:
    """Whether `name` is written like a Hub id and is no directory here."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and name[0] not in "./" and not Path(name).is_dir()


def weights_bytes(model_dir: Path) -> int:
    """Size of the weights on disk, which is about what one copy takes in memory."""
    return sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))


def _download(hub_id: str) -> Path:
    # Imported here: it takes most of a second, and a local directory needs none of it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except GatedRepoError:
        raise ConfigError(f"{hub_id} is gated: accept its licence on the Hub, then run `hf auth login`") from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"the Hub has no model {hub_id!r}, or it is private: check the name or run `hf auth login`"
        ) from None
    except LocalEntryNotFoundError:
        raise ConfigError(
            f"{hub_id} is not in the local cache and the Hub cannot be reached: check the network"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot download {hub_id}: {error}") from None
