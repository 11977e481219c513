"""Workers' torch lacks what it has for tensors without memory, until somebody wants it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LEAN = """
import json, sys
import common.device.engine.lean_torch
import torch
left_out = ["torch._meta_registrations", "torch._decomp", "torch._prims", "torch._refs"]
lean = [name for name in left_out if name in sys.modules]
product = torch.nn.functional.silu(torch.ones(2, 3) @ torch.ones(3, 2)).tolist()
import torch._meta_registrations
import common.device.engine.lean_torch
shape = torch.linalg.cholesky(torch.empty(3, 3, device="meta")).shape
print(json.dumps([lean, product, hasattr(torch._meta_registrations, "activate_meta"), list(shape)]))
"""


@pytest.mark.medium
def test_what_is_left_out_is_there_once_it_is_imported() -> None:
    said = subprocess.run([sys.executable, "-c", LEAN], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    lean, product, has_kernels, shape = json.loads(said.stdout)
    assert lean == [] and product[0] == pytest.approx([2.857722] * 2)
    assert has_kernels and shape == [3, 3]
