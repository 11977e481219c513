import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from deploy.serve.demo import DEMO_MODEL

SPEECHES = "".join(f"FIRST CITIZEN:\nThe {number}th hour strikes, and we have spoken well.\n\n" for number in range(80))


@pytest.mark.slow
def test_training_writes_a_whole_model_directory(tmp_path: Path) -> None:
    text, out_dir = tmp_path / "text", tmp_path / "model"
    text.write_text(SPEECHES)
    flags = ["--device", "cpu", "--steps", "2", "--batch-tokens", "128", "--eval-every", "1"]
    program = [sys.executable, str(DEMO_MODEL / "train.py"), str(text), str(out_dir), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # beside other tests several would wait for one another
    done = subprocess.run(program, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr
    assert "held out" in done.stdout
    config = json.loads((out_dir / "config.json").read_text())
    assert (config["model_type"], config["rope_theta"], config["torch_dtype"]) == ("qwen3", 10000.0, "bfloat16")
    assert config["eos_token_id"] == json.loads((out_dir / "generation_config.json").read_text())["eos_token_id"]


def test_the_bundled_model_is_small_whole_and_speaks_any_text() -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert tokenizer.token_to_id("<|endoftext|>") == config["eos_token_id"]
    for text in ("ROMEO:\nBut soft", "caf\u00e9 \u4e16\u754c \U0001f3ad\n\n", "\x00tab\t"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    with safe_open(DEMO_MODEL / "model.safetensors", "np") as weights:
        names = set(weights.keys())
        dtypes = {weights.get_slice(name).get_dtype() for name in names}
    assert "lm_head.weight" not in names
    assert dtypes == {"BF16"}
    assert sum(path.stat().st_size for path in DEMO_MODEL.iterdir() if path.suffix != ".py") <= 8_000_000
