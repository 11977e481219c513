"""Contents of config.json of known models, for benchmarks: the files of `published/`, by name."""

import json
from pathlib import Path
from typing import Any

from common.models.settings import Settings

PRESETS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "published").glob("*.json"))
}


def settings(model: str) -> Settings:
    """Return the settings of a known model."""
    return Settings(PRESETS[model], f"config.json of {model}")
