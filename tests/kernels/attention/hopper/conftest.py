"""Kernels that run on Hopper GPUs only: no interpreter has their instructions."""

from functools import partial

import pytest
import torch

from tests.kernels.attention.hopper.decode_steps import MakeStep, step_of
from tests.kernels.conftest import MakePaged


@pytest.fixture(
    params=[
        pytest.param(torch.float16, id="fp16", marks=pytest.mark.gpu),
        pytest.param(torch.bfloat16, id="bf16", marks=pytest.mark.gpu),
    ]
)
def target(request: pytest.FixtureRequest, hopper: torch.device) -> tuple[str, torch.dtype]:
    return hopper.type, request.param


@pytest.fixture
def make_step(make_paged: MakePaged) -> MakeStep:
    return partial(step_of, make_paged)
