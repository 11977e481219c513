"""Sizes of a layer of experts. Needs no torch."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from common.base import mxfp4
from common.base.activation import Activation
from common.base.routing import Route
from common.models.sizes.stacks import Order, Piece, Source, Stack, Stacks, stacked


class ExpertNames(NamedTuple):
    """Names of a layer's tensors in a checkpoint; "" where there is none."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    shared: str = ""  # an MLP as wide as all shared experts together
    shared_gate: str = ""  # a row of logits that opens the shared experts by a sigmoid
    selection_bias: str = ""  # of scores, for the choice alone
    expert_scale: str = ""  # factors of weights


NAMES = ExpertNames()


@dataclass(frozen=True, slots=True)
class Experts:
    """Gated MLPs of which each token has the few that a router chooses, behind a norm.

    A shared MLP is `num_shared` further experts that each token has. A checkpoint holds its experts one by one or
    stacked, and both forms load alike.
    """

    num: int  # to choose from
    inner: int
    route: Route
    activation: Activation = Activation.SILU
    num_shared: int = 0
    has_bias: bool = False  # of router, gate, up and down
    alternates: bool = False  # in the checkpoint, rows of gate and up alternate
    transposed: bool = False  # in the checkpoint, inputs are the rows of stacked experts
    is_mxfp4: bool = False  # matrices of experts are kept in MXFP4, as a checkpoint in this format has them
    names: ExpertNames = NAMES

    @property
    def num_all(self) -> int:
        return self.num + self.num_shared

    @property
    def router_rows(self) -> int:
        return self.num + bool(self.names.shared_gate)

    @property
    def num_rows(self) -> float:
        """Return the rows of all matrices, each as wide as the residual stream; rows in MXFP4 count by their bytes."""
        return self._held_rows(self.num_all)

    @property
    def token_rows(self) -> int:
        """Return the rows that a token is multiplied by."""
        return self.router_rows + 3 * self.inner * (self.route.per_token + self.num_shared)

    def step_rows(self, num_tokens: int) -> float:
        """Return the rows read by a decode step, on average over choices without preference."""
        num_unread = self.num * (1.0 - self.route.per_token / self.num) ** num_tokens
        return self._held_rows(self.num_all - num_unread)

    def read_share(self, num_tokens: int) -> float:
        """Return the share of all experts that a decode step reads, on average over choices without preference."""
        return 1.0 - self.num * (1.0 - self.route.per_token / self.num) ** num_tokens / self.num_all

    def _held_rows(self, num_experts: float) -> float:
        return self.router_rows + 3 * self.inner * num_experts * (mxfp4.BITS / 16 if self.is_mxfp4 else 1.0)

    def activation_elements(self, hidden_size: int) -> int:
        """Return the fp32 elements held at once for each token, beside the residual stream."""
        return self.router_rows + (self.route.per_token + self.num_shared) * (3 * self.inner + 2 * hidden_size)

    def stacks(self, source: Source, prefix: str) -> Stacks:
        name, hidden, names = f"{prefix}.{self.names.experts}", source.hidden_size, self.names
        rows = [(f"{prefix}.{names.router}.weight", self.num)]
        if names.shared_gate:
            rows.append((f"{prefix}.{names.shared_gate}.weight", 1))
        matrices = self._packed(name, hidden) if self.is_mxfp4 else self._matrices(name, hidden)
        stacks = {"router": stacked(rows, hidden)} | matrices
        if names.shared:
            stacks = self._with_shared(stacks, f"{prefix}.{names.shared}", hidden)
        if self.has_bias:
            stacks["router_bias"] = _column(f"{prefix}.{names.router}.bias", self.num)
            stacks["experts_gate_up_bias"] = Stack([self._gate_up_bias(f"{name}.gate_up_proj_bias")])
            down = Order((self.num * hidden,), (self.num, hidden), (0, 1))
            stacks["experts_down_bias"] = Stack([Piece(f"{name}.down_proj_bias", (self.num, hidden), order=down)])
        if names.selection_bias:
            stacks["selection_bias"] = _column(f"{prefix}.{names.selection_bias}", self.num)
        if names.expert_scale:
            stacks["expert_scale"] = _column(f"{prefix}.{names.expert_scale}", self.num)
        return stacks

    def _matrices(self, name: str, hidden: int) -> Stacks:
        return {
            "experts_gate_up": self._forms(self._each_gate_up(name, hidden), self._gate_up(name, hidden)),
            "experts_down": self._forms(self._each_down(name, hidden), self._down(name, hidden)),
        }

    def _packed(self, name: str, hidden: int) -> Stacks:
        """Return stacks of bytes: values, two a byte, and scales."""
        stacks = {}
        for matrix, sides, rows, width in (("gate_up", 2, self.inner, hidden), ("down", 1, hidden, self.inner)):
            groups = width // mxfp4.GROUP
            for key, stored, inside in (("", "blocks", (groups, mxfp4.GROUP // 2)), ("_scales", "scales", (groups,))):
                row = math.prod(inside)
                view = (self.num, sides, rows, row)
                file = (0, 2, 1, 3) if self.alternates else (0, 1, 2, 3)
                shape = (self.num, sides * rows, *inside)
                order = Order((self.num * sides * rows, row), view, file)
                piece = Piece(f"{name}.{matrix}_proj_{stored}", shape, order=order)
                stacks[f"experts_{matrix}{key}"] = Stack([piece], "uint8")
        return stacks

    def _forms(self, each: list[Piece], whole: Piece) -> Stack:
        """Return a stack of a single form where the checkpoint's layout is that of stacked experts alone."""
        return Stack([whole]) if self.transposed or self.alternates else Stack(each, others=([whole],))

    def _each_gate_up(self, name: str, hidden: int) -> list[Piece]:
        return [
            Piece(f"{name}.{expert}.{side}_proj.weight", (self.inner, hidden), (2 * expert + place) * self.inner)
            for expert in range(self.num)
            for place, side in enumerate(("gate", "up"))
        ]

    def _each_down(self, name: str, hidden: int) -> list[Piece]:
        shape = (hidden, self.inner)
        return [Piece(f"{name}.{each}.down_proj.weight", shape, each * hidden) for each in range(self.num)]

    def _gate_up(self, name: str, hidden: int) -> Piece:
        """Return all gates and ups of a stacked checkpoint: `[num, 2 * inner, hidden]` or its transpose."""
        rows, width = self.num * 2 * self.inner, 2 * self.inner
        view = (self.num, 2, self.inner, hidden)
        file = [0, 2, 1] if self.alternates else [0, 1, 2]
        file.insert(1 if self.transposed else 3, 3)
        shape = (self.num, hidden, width) if self.transposed else (self.num, width, hidden)
        return Piece(f"{name}.gate_up_proj", shape, order=Order((rows, hidden), view, tuple(file)))

    def _down(self, name: str, hidden: int) -> Piece:
        shape = (self.num, self.inner, hidden) if self.transposed else (self.num, hidden, self.inner)
        file = (0, 2, 1) if self.transposed else (0, 1, 2)
        order = Order((self.num * hidden, self.inner), (self.num, hidden, self.inner), file)
        return Piece(f"{name}.down_proj", shape, order=order)

    def _gate_up_bias(self, name: str) -> Piece:
        width = 2 * self.inner
        file = (0, 2, 1) if self.alternates else (0, 1, 2)
        return Piece(name, (self.num, width), order=Order((self.num * width,), (self.num, 2, self.inner), file))

    def _with_shared(self, stacks: Stacks, name: str, hidden: int) -> Stacks:
        """Return the stacks with the shared MLP divided into experts behind the others."""
        inner, count = self.inner, self.num_shared
        gate_up = [
            Piece(
                f"{name}.{side}_proj.weight",
                (count * inner, hidden),
                (2 * (self.num + shared) + place) * inner,
                (shared * inner, (shared + 1) * inner),
            )
            for shared in range(count)
            for place, side in enumerate(("gate", "up"))
        ]
        order = Order((count * hidden, inner), (count, hidden, inner), (1, 0, 2)) if count > 1 else None
        down = Piece(f"{name}.down_proj.weight", (hidden, count * inner), self.num * hidden, order=order)
        added = {"experts_gate_up": gate_up, "experts_down": [down]}
        return stacks | {
            key: stacks[key]._replace(
                pieces=stacks[key].pieces + pieces, others=tuple(form + pieces for form in stacks[key].others)
            )
            for key, pieces in added.items()
        }


def _column(name: str, length: int) -> Stack:
    return Stack([Piece(name, (length,))], "float32")
