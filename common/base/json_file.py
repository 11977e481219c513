"""Reader for JSON files of a model directory."""

import json
from pathlib import Path
from typing import Any

from common.base.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; raises ConfigError with the file's name and the problem."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}; fetch the model's own file again") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a JSON object; fetch the model's own file again")
    return content
