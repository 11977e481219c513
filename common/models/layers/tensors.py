"""Tensors of a layer by name, as the layer's parts take them."""

from collections.abc import Mapping

from torch import Tensor

from common.models.layers.output import Output
from common.models.sizes.stacks import SCALES
from common.ops.base import Norm, Weight


class LayerTensors:
    """Tensors of layer `number`, named as in `DecoderConfig.stacks` without the layer's prefix."""

    def __init__(self, tensors: Mapping[str, Tensor], number: int, norm_eps: float) -> None:
        self._tensors, self._prefix, self.norm_eps = tensors, f"layers.{number}.", norm_eps

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._prefix + name]

    def get(self, name: str) -> Tensor | None:
        """Return a tensor, or None if the layer has none of this name."""
        return self._tensors.get(self._prefix + name)

    def weight(self, name: str) -> Weight:
        """Return a matrix, with its bias if there is one."""
        return self._matrix(name, self.get(f"{name}_bias"))

    def unbiased(self, name: str) -> Weight:
        """Return a matrix whose bias, if there is one, is added elsewhere."""
        return self._matrix(name, None)

    def _matrix(self, name: str, bias: Tensor | None) -> Weight:
        scales = self.get(f"{name}{SCALES}")
        return Weight(self[name], bias, scales, None if scales is None else self._tensors["embed"].dtype)

    def norm(self, name: str) -> Norm:
        return Norm(self[name], self.norm_eps)

    def output(self, name: str, norm: str, scale: str = "") -> Output:
        """Return the product that a part ends with; the norm and the scale behind it if the layer has them."""
        return Output(self.weight(name), None if self.get(norm) is None else self.norm(norm), self.get(scale))
