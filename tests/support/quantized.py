"""Products of codes of 8 bits, written once more: transformers' models with quantized matrices."""

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

PRODUCTS = re.compile(
    r"model\.layers\.\d+\.((self_attn|linear_attn)\.(?!kv_b_proj)\w*proj\w*|mlp\.(gate|up|down)_proj)"
)
"""Names of the matrices that are quantized with their inputs: all of attention, states and dense MLPs."""
EXPERTS = re.compile(r".*\.experts\.(gate_up|down)_proj")
SHARED = re.compile(r".*\.shared_experts?\.(gate|up|down)_proj")
"""Names of matrices that are quantized, with inputs as they are."""


def rounded(x: Tensor, scheme: str, columns: int = 0) -> Tensor:
    """Return the numbers that codes of each row of `x` stand for, in fp64; `columns` of it share a scale, or all."""
    if columns:
        return torch.cat([rounded(part, scheme) for part in x.split(columns, -1)], -1)
    largest = 448.0 if scheme == "fp8" else 127.0
    scale = x.abs().amax(-1, keepdim=True).float() / largest
    scale = torch.where(scale > 0, scale, 1.0)
    codes = x.float() / scale
    codes = codes.to(torch.float8_e4m3fn).double() if scheme == "fp8" else codes.round().double()
    return codes * scale.double()


class QuantizedLinear(nn.Module):
    """A product of a quantized matrix and quantized rows, or with `plain_inputs` of rows as they are."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scheme: str, columns: int, *, plain_inputs: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.scheme, self.columns = weight, bias, scheme, columns
        self.plain_inputs = plain_inputs

    def forward(self, x: Tensor) -> Tensor:
        product = (x.double() if self.plain_inputs else rounded(x, self.scheme, self.columns)) @ self.weight.t()
        return (product if self.bias is None else product + self.bias.double()).to(x.dtype)


def quantized_copy(model: Any, scheme: str, *, plain_inputs: bool = False) -> Any:
    """Return a copy of a model of transformers whose products are quantized, or their matrices alone."""

    def made(linear: nn.Linear) -> QuantizedLinear:
        weight = rounded(linear.weight.detach(), scheme)
        return QuantizedLinear(weight, linear.bias, scheme, 0, plain_inputs=plain_inputs)

    model = _changed(model, made)
    _round_experts(model, scheme)
    return model


def with_quantized_head(model: Any, scheme: str, *, plain_inputs: bool = False) -> Any:
    """Return a copy of a model of transformers whose matrix of logits is quantized; the input's table is not."""
    model = copy.deepcopy(model)
    weight = rounded(model.lm_head.weight.detach(), scheme)
    model.lm_head = QuantizedLinear(weight, None, scheme, 0, plain_inputs=plain_inputs)
    return model


@torch.no_grad()
def _round_experts(model: Any, scheme: str) -> None:
    """Round the rows of experts; a shared MLP is several experts, and so are parts of its rows."""
    for name, parameter in model.named_parameters():
        if EXPERTS.fullmatch(name):
            is_turned = model.config.model_type == "gpt_oss"  # inputs are the rows
            rows = parameter.mT if is_turned else parameter
            made = rounded(rows, scheme).to(parameter.dtype)
            parameter.copy_(made.mT if is_turned else made)
    for name, module in model.named_modules():
        if SHARED.fullmatch(name):
            columns = getattr(model.config, "moe_intermediate_size", 0) if name.endswith("down_proj") else 0
            module.weight.copy_(rounded(module.weight, scheme, columns).to(module.weight.dtype))


def quantized_inputs(model: Any, scheme: str, columns: int = 0) -> Any:
    """Return a copy of a model of transformers whose products have matrices as they are, and quantized inputs.

    Args:
        columns: of inputs, that share a scale; 0: all.
    """

    def made(linear: nn.Linear) -> QuantizedLinear:
        return QuantizedLinear(linear.weight.detach().double(), linear.bias, scheme, columns, plain_inputs=False)

    return _changed(model, made)


def _changed(model: Any, made: Callable[[nn.Linear], nn.Module]) -> Any:
    model = copy.deepcopy(model)
    chosen = [name for name, module in model.named_modules() if PRODUCTS.fullmatch(name)]
    assert chosen, "nothing to quantize"
    for name in chosen:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        model.set_submodule(name, made(linear))
    return model
