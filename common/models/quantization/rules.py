"""Formats of a checkpoint's matrices by name, as its configuration says. Needs no torch."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from fnmatch import fnmatchcase

from common.models.quantization.formats import Format


class Match(Enum):
    """Comparison of a rule's text with the name of a module."""

    ALL = auto()
    EXACT = auto()
    PART = auto()  # the name, its beginning or its end, up to a point
    REGEX = auto()  # from the name's beginning on
    WILDCARD = auto()


@dataclass(frozen=True, slots=True)
class Rule:
    """The format of the modules whose names match; None: they are not quantized."""

    match: Match
    text: str
    format: Format | None

    def matches(self, name: str) -> bool:
        """Tell whether the rule is about a module."""
        if self.match is Match.ALL:
            return True
        if self.match is Match.REGEX:
            return re.match(self.text, name) is not None
        if self.match is Match.WILDCARD:
            return fnmatchcase(name, self.text)
        if self.match is Match.PART:
            return f".{name}.".startswith(f".{self.text}.") or name.endswith(f".{self.text}")
        return name == self.text


@dataclass(frozen=True, slots=True)
class Quantization:
    """Formats of a checkpoint's matrices, as its configuration has them.

    Args:
        where: file and key, for messages.
        method: value of `quant_method`.
        rules: the first that matches a module's name holds.
        is_loose: lists of unquantized modules are often incomplete, so a plain matrix is no contradiction.
        input_bits: bits to which activations are quantized where the checkpoint was made; 16 for none.
        kv_cache: how the checkpoint wants keys and values; "" for nothing.
    """

    where: str
    method: str
    rules: tuple[Rule, ...]
    is_loose: bool = False
    input_bits: int = 16
    kv_cache: str = ""

    def format_of(self, names: Iterable[str]) -> Format | None:
        """Return the format of a module known by several names; None if it is not quantized."""
        names = tuple(names)
        for rule in self.rules:
            if any(rule.matches(name) for name in names):
                return rule.format
        return None
