"""A model for tests of what workers do on a GPU."""

import json
from pathlib import Path

import pytest

from benchmarks.make_checkpoint import weight_shapes, write_weights
from benchmarks.presets import PRESETS


@pytest.fixture(scope="session")
def real_shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of a real model's shapes, for which kernels and plans are those of a worker."""
    config, path = PRESETS["qwen3-0.6b"] | {"num_hidden_layers": 2}, tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(config))
    write_weights(weight_shapes(config), path, seed=0)
    return path
