"""Steps alone, on a CPU: what rows ask for they get, so that its time is what is measured."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.decode_step import ASKS, StepBench
from benchmarks.own_memory import own_memory, require_gpu
from tests.support.marks import first_then

Checkpoint = Callable[[str], tuple[Path, Any]]


@pytest.mark.medium
@pytest.mark.parametrize("asked", first_then(pytest.mark.slow, ASKS))
def test_a_step_does_what_its_rows_ask_for(asked: str, checkpoint: Checkpoint) -> None:
    directory, _ = checkpoint("qwen3-tied")
    shown = {"quantization": "auto", "head": "int8", "kv_dtype": "fp8"}
    args = argparse.Namespace(model_dir=str(directory), batches=[3], no_pdl=False, cublas=False, **shown)
    with own_memory("cpu") as memory:
        see(StepBench(args, memory, "cpu"), asked)


def test_what_needs_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    require_gpu("cpu")
    with pytest.raises(SystemExit, match="2"):
        require_gpu("cuda:1")
    assert "needs a CUDA GPU" in capsys.readouterr().err


def see(bench: StepBench, asked: str) -> None:
    """That one step does it."""
    bench.sampling = ASKS[asked]
    assert bench.fill([20, 30, 25])
    before = bench.batch.adjustments.tensors.counts.sum()
    output = bench.launch(3).output()
    bench.find_masks()
    num_counted = 3 if asked in ("penalties", "grammar", "both") else 0
    assert bench.batch.adjustments.tensors.counts.sum() - before == num_counted
    assert all(token.token_id >= 0 for step in (output, bench.launch(3).output()) for [token] in step.rows)
    told = {token.logprobs and len(token.logprobs.values) for [token] in output.rows}
    assert told == ({6} if asked in ("logprobs", "both") else {None})
