"""Formats of a checkpoint's matrices by name, as its configuration says. Needs no torch."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from fnmatch import fnmatchcase
from itertools import islice

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
        match self.match:
            case Match.ALL:
                return True
            case Match.EXACT:
                return name == self.text
            case Match.PART:
                return self.text in _parts(name)
            case Match.REGEX:
                return re.match(self.text, name) is not None
            case Match.WILDCARD:
                return fnmatchcase(name, self.text)


def _parts(name: str) -> set[str]:
    """Return a name, and its beginnings and ends up to a point."""
    points = [place for place, character in enumerate(name) if character == "."]
    return {name, *(name[:point] for point in points), *(name[point + 1 :] for point in points)}


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


class Formats:
    """Formats of modules by name: lists of names are looked up, because they and the modules may be thousands."""

    def __init__(self, quantization: Quantization) -> None:
        self.rules = quantization.rules
        self._exact, self._parts = self._places(Match.EXACT), self._places(Match.PART)
        listed = (Match.EXACT, Match.PART)
        self._others = [place for place, rule in enumerate(self.rules) if rule.match not in listed]

    def of(self, names: Iterable[str]) -> Format | None:
        """Return the format of a module known by several names; None if it is not quantized."""
        names = tuple(names)
        found = [self._exact[name] for name in names if name in self._exact]
        if self._parts:
            found += [self._parts[part] for name in names for part in _parts(name) if part in self._parts]
        other = (place for place in self._others if any(self.rules[place].matches(name) for name in names))
        first = min([*found, *islice(other, 1)], default=None)
        return None if first is None else self.rules[first].format

    def _places(self, match: Match) -> dict[str, int]:
        """Return the first place of each text among the rules of a kind."""
        places = [(rule.text, place) for place, rule in enumerate(self.rules) if rule.match is match]
        return dict(reversed(places))
