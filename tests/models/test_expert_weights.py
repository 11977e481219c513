"""Experts load alike from every form of a checkpoint, and a checkpoint in no form is refused by name."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from common.base.errors import ModelError
from common.base.routing import Route
from common.models.loading.weights import load_weights, weights_layout
from common.models.sizes.experts import ExpertNames, Experts
from common.models.sizes.stacks import Source

HIDDEN, INNER, NUM = 10, 6, 5
SHARED = ExpertNames(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")
PLAIN = Experts(NUM, INNER, Route(2))
TWO_SHARED = Experts(NUM, INNER, Route(2), num_shared=2, names=SHARED)


def whole(num: int = NUM) -> tuple[Tensor, Tensor]:
    """Gate above up, and down, of experts whose numbers are all different."""
    gate_up = torch.arange(num * 2 * INNER * HIDDEN).view(num, 2 * INNER, HIDDEN).float()
    return gate_up, -torch.arange(num * HIDDEN * INNER).view(num, HIDDEN, INNER).float() - 1.0


def one_by_one(gate_up: Tensor, down: Tensor, num: int = NUM) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for expert in range(num):
        gate, up = gate_up[expert].chunk(2)
        parts = {"gate": gate, "up": up, "down": down[expert]}
        tensors |= {f"m.mlp.experts.{expert}.{name}_proj.weight": each for name, each in parts.items()}
    return tensors


def stacked(gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
    return {"m.mlp.experts.gate_up_proj": gate_up, "m.mlp.experts.down_proj": down}


def load(experts: Experts, tensors: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    save_file({name: each.contiguous() for name, each in tensors.items()}, directory / "model.safetensors")
    layout = weights_layout(experts.stacks(Source(HIDDEN), "m"), torch.float32)
    region = torch.full((layout.num_bytes,), 255, dtype=torch.uint8)
    load_weights(directory, layout, region, ignored=(), progress=lambda done, total: None).wait()
    return layout.tensors(region)


ROUTER = {"m.mlp.gate.weight": torch.randn(NUM, HIDDEN)}


@pytest.mark.parametrize("form", [one_by_one, stacked])
def test_experts_one_by_one_and_stacked_load_alike(form: object, tmp_path: Path) -> None:
    gate_up, down = whole()
    tensors = one_by_one(gate_up, down) if form is one_by_one else stacked(gate_up, down)
    loaded = load(PLAIN, tensors | ROUTER, tmp_path)
    assert torch.equal(loaded["experts_gate_up"].view_as(gate_up), gate_up)
    assert torch.equal(loaded["experts_down"].view_as(down), down)
    assert torch.equal(loaded["router"], ROUTER["m.mlp.gate.weight"])


@pytest.mark.parametrize("form", [one_by_one, stacked])
def test_a_shared_mlp_is_divided_into_experts_behind_the_others(form: object, tmp_path: Path) -> None:
    gate_up, down = whole(NUM + 2)
    shared = {
        "m.mlp.shared_expert.gate_proj.weight": gate_up[NUM:, :INNER].flatten(0, 1),
        "m.mlp.shared_expert.up_proj.weight": gate_up[NUM:, INNER:].flatten(0, 1),
        "m.mlp.shared_expert.down_proj.weight": torch.cat((down[NUM], down[NUM + 1]), dim=1),
        "m.mlp.shared_expert_gate.weight": torch.randn(1, HIDDEN),
    }
    tensors = one_by_one(gate_up, down) if form is one_by_one else stacked(gate_up[:NUM], down[:NUM])
    loaded = load(TWO_SHARED, tensors | shared | ROUTER, tmp_path)
    assert torch.equal(loaded["experts_gate_up"].view_as(gate_up), gate_up)
    assert torch.equal(loaded["experts_down"].view_as(down), down)
    assert torch.equal(loaded["router"][NUM:], shared["m.mlp.shared_expert_gate.weight"])


@pytest.mark.parametrize("alternates", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_other_orders_of_stacked_experts_are_undone(alternates: bool, transposed: bool, tmp_path: Path) -> None:
    gate_up, down = whole()
    bias, down_bias = torch.randn(NUM, 2 * INNER), torch.randn(NUM, HIDDEN)
    order = torch.arange(2 * INNER).view(2, INNER).t().flatten() if alternates else torch.arange(2 * INNER)
    stored, stored_down = gate_up[:, order], down
    if transposed:
        stored, stored_down = stored.mT, stored_down.mT
    tensors = stacked(stored, stored_down) | {
        "m.mlp.experts.gate_up_proj_bias": bias[:, order],
        "m.mlp.experts.down_proj_bias": down_bias,
        "m.mlp.router.weight": ROUTER["m.mlp.gate.weight"],
        "m.mlp.router.bias": torch.randn(NUM),
    }
    names = ExpertNames(router="mlp.router")
    experts = Experts(NUM, INNER, Route(2), has_bias=True, alternates=alternates, transposed=transposed, names=names)
    loaded = load(experts, tensors, tmp_path)
    assert torch.equal(loaded["experts_gate_up"].view_as(gate_up), gate_up)
    assert torch.equal(loaded["experts_down"].view_as(down), down)
    assert torch.equal(loaded["experts_gate_up_bias"].view_as(bias), bias)
    assert torch.equal(loaded["experts_down_bias"].view_as(down_bias), down_bias)
    assert torch.equal(loaded["router_bias"], tensors["m.mlp.router.bias"])


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("experts.3.up_proj", r"1 missing tensors: m\.mlp\.experts\.3\.up_proj\.weight; or, in another form, "),
        ("experts", r"15 missing tensors: .*experts\.0\.down_proj.* and 10 more; or, in another form, .*gate_up_proj"),
    ],
)
def test_a_checkpoint_in_no_form_is_refused_by_name(lost: str, message: str, tmp_path: Path) -> None:
    tensors = {name: each for name, each in (one_by_one(*whole()) | ROUTER).items() if lost not in name}
    with pytest.raises(ModelError, match=message):
        load(PLAIN, tensors, tmp_path)


def test_a_stacked_checkpoint_that_lacks_a_half_is_refused_by_its_name(tmp_path: Path) -> None:
    tensors = {name: each for name, each in (stacked(*whole()) | ROUTER).items() if "down" not in name}
    with pytest.raises(ModelError, match=r"or, in another form, m\.mlp\.experts\.down_proj;"):
        load(PLAIN, tensors, tmp_path)


def test_tensors_of_both_forms_are_unexpected(tmp_path: Path) -> None:
    tensors = one_by_one(*whole()) | stacked(*whole()) | ROUTER
    with pytest.raises(ModelError, match=re.escape("2 unexpected tensors: m.mlp.experts.down_proj")):
        load(PLAIN, tensors, tmp_path)


def test_a_checkpoint_in_several_files_names_the_file_of_each_expert(tmp_path: Path) -> None:
    tensors = one_by_one(*whole()) | ROUTER
    index = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        file = f"model-{number % 3}.safetensors"
        index[name] = file
        save_file({key: tensors[key].contiguous() for key, of in index.items() if of == file}, tmp_path / file)
        assert tensor.ndim == 2
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    layout = weights_layout(PLAIN.stacks(Source(HIDDEN), "m"), torch.float32)
    region = torch.full((layout.num_bytes,), 255, dtype=torch.uint8)
    load_weights(tmp_path, layout, region, ignored=(), progress=lambda done, total: None).wait()
    assert torch.equal(layout.tensors(region)["experts_gate_up"].view(NUM, -1, HIDDEN), whole()[0])
