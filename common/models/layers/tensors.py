"""Tensors of a layer by name, as the layer's parts take them."""

from collections.abc import Mapping

from torch import Tensor

from common.models.layers.output import Output
from common.models.sizes.codes import Codes
from common.models.sizes.stacks import FACTORS, OFFSETS, SCALES
from common.ops.base import Norm, Weight

Forms = Mapping[str, Codes]
"""Forms of matrices that are held in codes, by name."""


def weight_of(tensors: Mapping[str, Tensor], forms: Forms, name: str, bias: Tensor | None = None) -> Weight:
    """Return a matrix in the form that it is held in."""
    form = forms.get(name)
    if form is None:
        return Weight(tensors[name], bias)
    scales, offsets = tensors[f"{name}{SCALES}"], tensors.get(f"{name}{OFFSETS}")
    is_wide, factors = form.is_weight_only and form.dtype == "int8", tensors.get(f"{name}{FACTORS}")
    return Weight(tensors[name], bias, scales, tensors["embed"].dtype, offsets, is_wide, factors)


class LayerTensors:
    """Tensors of layer `number`, named as in `DecoderConfig.stacks` without the layer's prefix.

    Args:
        forms: of the matrices of all layers that are held in codes.
    """

    def __init__(self, tensors: Mapping[str, Tensor], forms: Forms, number: int, norm_eps: float) -> None:
        self._tensors, self._forms = tensors, forms
        self._prefix, self.norm_eps = f"layers.{number}.", norm_eps

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
        return weight_of(self._tensors, self._forms, self._prefix + name, bias)

    def norm(self, name: str) -> Norm:
        return Norm(self[name], self.norm_eps)

    def output(self, name: str, norm: str, scale: str = "") -> Output:
        """Return the product that a part ends with; the norm and the scale behind it if the layer has them."""
        return Output(self.weight(name), None if self.get(norm) is None else self.norm(norm), self.get(scale))
