"""Formats of a checkpoint's matrices by name, as its configuration says. Needs no torch."""

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice

from common.models.quantization.formats import Format


class Match(Enum):
    """Comparison of a rule's text with the name of a module."""

    ALL = auto()
    EXACT = auto()
    PART = auto()  # the name, its beginning or its end, up to a point
    REGEX = auto()  # from the name's beginning on
    WILDCARD = auto()  # the whole name, with `*`, `?` and sets of characters in brackets


EXPRESSIONS = (Match.REGEX, Match.WILDCARD)
"""Comparisons that are tried one by one; others are looked up."""
MAX_EXPRESSIONS = 4096
"""Of a configuration, because each may be tried for tens of thousands of modules."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The format of the modules whose names match; None: they are not quantized."""

    match: Match
    text: str
    format: Format | None

    @property
    def pattern(self) -> re.Pattern[str]:
        """Return the expression that the beginning of a name has to match."""
        return re.compile(fnmatch.translate(self.text) if self.match is Match.WILDCARD else self.text)


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
    """Formats of modules by name: lists of names are looked up, because they and the modules may be thousands.

    Expressions are tried one by one, each compiled once.
    """

    def __init__(self, quantization: Quantization) -> None:
        self.rules = quantization.rules
        self._exact, self._parts = self._places(Match.EXACT), self._places(Match.PART)
        self._all = next((place for place, rule in enumerate(self.rules) if rule.match is Match.ALL), None)
        self._patterns = [
            (place, rule.pattern.match) for place, rule in enumerate(self.rules) if rule.match in EXPRESSIONS
        ]

    def of(self, names: Iterable[str]) -> Format | None:
        """Return the format of a module known by several names; None if it is not quantized."""
        names = tuple(names)
        found = [] if self._all is None else [self._all]
        found += [self._exact[name] for name in names if name in self._exact]
        if self._parts:
            found += [self._parts[part] for name in names for part in _parts(name) if part in self._parts]
        last = min(found, default=len(self.rules))
        others = (place for place, match in self._patterns if place < last and any(map(match, names)))
        first = min([*found, *islice(others, 1)], default=None)
        return None if first is None else self.rules[first].format

    def _places(self, match: Match) -> dict[str, int]:
        """Return the first place of each text among the rules of a kind."""
        places = [(rule.text, place) for place, rule in enumerate(self.rules) if rule.match is match]
        return dict(reversed(places))
