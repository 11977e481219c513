"""Tensors of a model as stacks of checkpoint tensors. Needs no torch."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from common.models.sizes.codes import Codes, Role


class Order(NamedTuple):
    """Order in which a checkpoint has the elements of a piece, where it is not the order of the stack."""

    shape: tuple[int, ...]  # of the piece's rows in the stack
    view: tuple[int, ...]  # dimensions that these rows are divided into
    file: tuple[int, ...]  # dimensions of `view`, from the outermost to the innermost in the file


class Piece(NamedTuple):
    """Rows of a checkpoint tensor, and their place in a stack: rows `[begin, begin + num_rows)`."""

    checkpoint_name: str
    shape: tuple[int, ...]  # of the checkpoint tensor
    begin: int = 0
    rows: tuple[int, int] | None = None  # first row taken, and the end; None for all
    order: Order | None = None  # of a whole tensor; None: rows as they are

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """Return the shape of the piece's rows in the stack."""
        if self.order is not None:
            return self.order.shape
        begin, end = self.rows or (0, self.shape[0])
        return (end - begin, *self.shape[1:])

    @property
    def num_rows(self) -> int:
        return self.stack_shape[0]


class Stack(NamedTuple):
    """A tensor of a model, and how it comes from a checkpoint."""

    pieces: list[Piece]
    dtype: str | None = None  # None for the dtype that the model is served in
    add: float = 0.0  # to each element, when it is loaded
    others: tuple[list[Piece], ...] = ()  # further forms in which a checkpoint may hold the same rows
    form: Codes | None = None  # in which the rows are held; None for elements
    role: Role = Role.CODES  # what the tensor holds of the form
    keeps_codes: bool = False  # of the checkpoint; other codes are made when they are loaded

    @property
    def is_beside(self) -> bool:
        """Tell whether the tensor holds scales, offsets or factors of codes, and comes with these."""
        return self.form is not None and self.role is not Role.CODES

    @property
    def elements(self) -> tuple[int, ...]:
        """Return the shape of the elements, whatever form they are held in."""
        num_rows = sum(piece.num_rows for piece in self.pieces)
        return (num_rows, *self.pieces[0].stack_shape[1:])

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the tensor."""
        if self.form is None:
            return self.elements
        num_rows, width = self.elements
        return self.form.shape_of(self.role, num_rows, width)

    @property
    def forms(self) -> tuple[list[Piece], ...]:
        """Return the forms in which a checkpoint may hold the rows."""
        return (self.pieces, *self.others)

    def pieces_of(self, held: Collection[str]) -> list[Piece]:
        """Return the form of which a checkpoint with the tensors `held` has most; the first if it has none."""
        if not self.others:
            return self.pieces
        return max(self.forms, key=lambda form: sum(each.checkpoint_name in held for each in form))


Stacks = dict[str, Stack]
"""Tensors of a model by name."""
SCALES, OFFSETS, FACTORS = "_scales", "_offsets", "_factors"
"""Ends of the names of a quantized matrix's scales, offsets and factors of rows, behind the matrix's name."""


class NormNames(NamedTuple):
    """Names of the norms around the parts of a layer, in a checkpoint; "" where there is none."""

    before_mixer: str = "input_layernorm"
    before_mlp: str = "post_attention_layernorm"
    after_mixer: str = ""
    after_mlp: str = ""

    def stacks(self, source: "Source", prefix: str) -> Stacks:
        """Return the norms of a layer, by the fields' names."""
        named = {field: name for field, name in self._asdict().items() if name}
        return {field: source.norm(f"{prefix}.{name}.weight", source.hidden_size) for field, name in named.items()}


PRE_NORMS = NormNames()
SANDWICH_NORMS = NormNames(
    before_mixer="input_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mixer="post_attention_layernorm",
    after_mlp="post_feedforward_layernorm",
)


@dataclass(frozen=True, slots=True)
class Source:
    """Habits of a family's checkpoints."""

    hidden_size: int
    norm_offset: float = 0.0  # 1 where norms are stored as an offset from 1
    ignored: tuple[str, ...] = ()  # beginnings of names of tensors that are not needed
    norms: NormNames = PRE_NORMS

    def norm(self, name: str, width: int) -> Stack:
        """Return a norm's weight; 1 + w needs fp32, because bfloat16 near 1 keeps too few bits of w."""
        return Stack([Piece(name, (width,))], "float32" if self.norm_offset else None, self.norm_offset)

    def matrix(self, name: str, num_rows: int, width: int = 0) -> Stack:
        """Return a matrix of a single checkpoint tensor; its rows are as wide as the residual stream by default."""
        return Stack([Piece(name, (num_rows, width or self.hidden_size))])


def stacked(parts: list[tuple[str, int]], *width: int) -> Stack:
    """Return checkpoint tensors, each of a name and a number of rows, one below the other."""
    pieces, begin = [], 0
    for name, num_rows in parts:
        pieces.append(Piece(name, (num_rows, *width), begin))
        begin += num_rows
    return Stack(pieces)


def permuted(name: str, shape: tuple[int, ...], ranges: list[tuple[int, int]]) -> list[Piece]:
    """Return row ranges of a checkpoint tensor, in the order that a model wants."""
    pieces, begin = [], 0
    for rows in ranges:
        pieces.append(Piece(name, shape, begin, rows))
        begin += rows[1] - rows[0]
    return pieces
