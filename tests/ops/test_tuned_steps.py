"""Steps to choose plans in have the layers, caches and products of each known model."""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.linear_candidates import Shape, shapes_of
from benchmarks.presets import PRESETS, settings
from benchmarks.tune_linear import BLOCK_SIZE, CONTEXT, LAYERS, decode_batch, few_layers, made_caches, made_weights
from common.models.decoder import Decoder
from common.models.reading import decoder_config
from common.ops.base import Activation, Norm, Residual, Routing, Scheme, Weight
from common.ops.linear_plan import Fusion
from common.wire.values.kv_layout import CacheKind

EACH = pytest.mark.parametrize("preset", sorted(PRESETS))
TOKENS, NOWHERE = 4, torch.device("meta")


class Products:
    """Operations that only note the products that are planned, with results of their shapes."""

    def __init__(self) -> None:
        self.shapes: set[Shape] = set()

    def _note(self, fusion: Fusion, x: Tensor, weight: Weight, n: int) -> Tensor:
        assert x.shape[1] == weight.num_in
        self.shapes.add(Shape(fusion, n, weight.num_in, weight.scheme))
        return x.new_empty((x.shape[0], n))

    def norm_linear(self, x: Residual, norm: Norm, weight: Weight) -> Tensor:
        return self._note(Fusion.NORM, x.rows, weight, weight.num_out)

    def norm_gate_up(self, x: Residual, norm: Norm, weight: Weight, activation: Activation) -> Tensor:
        return self._note(Fusion.GATE, x.rows, weight, weight.num_out // 2)

    def linear_add(self, x: Tensor, weight: Weight, residual: Residual) -> Residual:
        return Residual(self._note(Fusion.ADD, x, weight, weight.num_out))

    def linear_norm_add(self, x: Tensor, weight: Weight, norm: Norm, residual: Residual, scale: Any) -> Residual:
        return self.linear_add(x, weight, residual)

    def logits(self, x: Residual, norm: Norm, weight: Weight, cap: float) -> Tensor:
        return self._note(Fusion.LOGITS, x.rows, weight, weight.num_out)

    def norm(self, x: Residual, norm: Norm) -> Tensor:
        return x.rows

    def norm_add(self, x: Tensor, norm: Norm, residual: Residual, scale: Any) -> Residual:
        return residual

    def norm_route(self, x: Residual, norm: Norm, router: Any, present: Tensor) -> tuple[Tensor, Routing]:
        return x.rows, Routing(present, present)

    def experts_add(self, x: Tensor, routing: Routing, weights: Any, residual: Residual) -> Residual:
        return residual

    def experts_norm_add(self, x: Tensor, routing: Routing, weights: Any, norm: Norm, residual: Residual) -> Residual:
        return residual


@EACH
@pytest.mark.parametrize("scheme", [Scheme.PLAIN, Scheme.FP8, Scheme.INT8])
def test_a_few_layers_have_the_products_of_all(preset: str, scheme: Scheme) -> None:
    config = few_layers(preset, scheme)
    assert len(config.layers) == LAYERS
    assert set(config.layers) == set(decoder_config(settings(preset)).layers)
    model, products = Decoder(config, made_weights(config, NOWHERE), CONTEXT), Products()
    tasks: Any = model.product_tasks(products, TOKENS)  # type: ignore[arg-type]
    for task in tasks:
        task()
    model.logits(model.zeros(TOKENS), products)  # type: ignore[arg-type]
    assert products.shapes == set(shapes_of(preset, scheme))


@EACH
def test_caches_hold_what_the_batch_names(preset: str) -> None:
    config = few_layers(preset)
    batch = decode_batch(config, TOKENS, torch.device("cpu"))
    groups = config.cache_groups(BLOCK_SIZE, "bfloat16")
    for group, cache, table in zip(groups, made_caches(config, TOKENS, NOWHERE), batch.block_tables, strict=True):
        assert (cache.window, cache.has_states) == (group.window, group.kind is CacheKind.STATE)
        assert table.shape == (TOKENS, group.num_places(CONTEXT))
        assert sorted(table.flatten().tolist()) == list(range(cache.blocks.shape[0]))


def test_weights_have_the_types_of_their_stacks() -> None:
    config = few_layers("gpt-oss-20b")
    stacks, weights = config.stacks(), made_weights(config, NOWHERE)
    packed = {name for name, weight in weights.items() if weight.dtype == torch.uint8}
    assert packed == {name for name, stack in stacks.items() if stack.dtype == "uint8"} and packed
    assert weights["layers.0.sinks"].dtype == torch.float32
