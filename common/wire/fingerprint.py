"""Short names for what is on disk, so that processes serving different models notice when they meet."""

import hashlib
from pathlib import Path

from common.errors import ConfigError

_SAMPLES = 16
_SAMPLE_BYTES = 65_536


def tokenizer_fingerprint(model_dir: Path) -> str:
    """16 hex digits of tokenizer.json; raises ConfigError when there is none."""
    path = model_dir / "tokenizer.json"
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; a model directory needs tokenizer.json") from None


def model_fingerprint(model_dir: Path) -> str:
    """16 hex digits of config.json and of samples of every weight file.

    Sampled, because reading all of a large checkpoint takes longer than loading it: the name, the
    size and 16 evenly spaced pieces of 64 KiB tell two checkpoints of one shape apart.
    """
    digest = hashlib.sha256()
    try:
        digest.update((model_dir / "config.json").read_bytes())
        for path in sorted(model_dir.glob("*.safetensors")):
            _update_with_samples(digest, path)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}; a model directory needs config.json") from None
    return digest.hexdigest()[:16]


def _update_with_samples(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name} {size}".encode())
    with path.open("rb") as file:
        for i in range(_SAMPLES):
            file.seek(i * max(0, size - _SAMPLE_BYTES) // max(1, _SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
