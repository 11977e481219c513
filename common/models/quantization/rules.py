"""Formats of a checkpoint's matrices by name, as its configuration says. Needs no torch."""

import fnmatch
import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain
from pathlib import Path

from common.base.errors import ModelError
from common.models.quantization.formats import Format

SOURCE_ROOT = Path(__file__).resolve().parents[3]


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
MATCHING_S = 60
"""Processor time for all expressions of a configuration; a hundred with 300,000 names take about ten."""
PATIENCE = 5
"""Times as long may pass where other processes use the processors, too."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The format of the modules whose names match; None: they are not quantized."""

    match: Match
    text: str
    format: Format | None

    @property
    def pattern(self) -> str:
        """Return the expression that the beginning of a name has to match."""
        return fnmatch.translate(self.text) if self.match is Match.WILDCARD else self.text


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


def formats_of(
    quantization: Quantization, modules: Sequence[Collection[str]], limit_s: int = MATCHING_S
) -> list[Format | None]:
    """Return the format of each module, None if it is not quantized; a module is known by several names.

    Texts of rules are looked up, because they and the modules may be thousands. Expressions are tried one by one.

    Args:
        limit_s: processor time for all expressions, else ModelError.
    """
    rules = quantization.rules
    exact, parts = _places(rules, Match.EXACT), _places(rules, Match.PART)
    of_all = next((place for place, rule in enumerate(rules) if rule.match is Match.ALL), len(rules))
    names = list(dict.fromkeys(chain.from_iterable(modules)))
    by_expressions = _first_expressions(quantization, names, limit_s)
    formats = list[Format | None]()
    for known_as in modules:
        found = [of_all]
        for name in known_as:
            found += [places[name] for places in (exact, by_expressions) if name in places]
            found += [parts[part] for part in _parts(name) if part in parts] if parts else []
        formats.append(rules[min(found)].format if min(found) < len(rules) else None)
    return formats


def _places(rules: Sequence[Rule], match: Match) -> dict[str, int]:
    """Return the first place of each text among the rules of a kind."""
    places = [(rule.text, place) for place, rule in enumerate(rules) if rule.match is match]
    return dict(reversed(places))


def _first_expressions(quantization: Quantization, names: list[str], limit_s: int) -> dict[str, int]:
    """Return the place of the first expression that matches a name, for names that have one.

    Another process compares them. An expression may backtrack for years, and no thread could end that.
    """
    rules = [(place, rule) for place, rule in enumerate(quantization.rules) if rule.match in EXPRESSIONS]
    if not rules or not names:
        return {}
    command = [sys.executable, "-m", __name__, str(limit_s)]
    job = json.dumps([[rule.pattern for _, rule in rules], names])
    try:
        process = subprocess.run(
            command, cwd=SOURCE_ROOT, input=job, capture_output=True, text=True, timeout=PATIENCE * limit_s
        )
        output, failed = process.stdout, process.returncode
    except subprocess.TimeoutExpired as late:
        output, failed = (late.stdout or b"").decode(), -signal.SIGKILL
    *lines, _ = output.split("\n")
    if failed:
        text, *_ = (rule.text for _, rule in rules[len(lines) :] or rules[-1:])
        reason = f"takes more than {limit_s} s" if failed == -signal.SIGKILL else f"fails: {process.stderr[-300:]!r}"
        raise ModelError(
            f"{quantization.where}: {text!r:.200}, compared with {len(names)} names of modules, {reason}; "
            "write the expression without a repetition inside another, or name the modules"
        )
    matched = zip(rules, map(json.loads, lines), strict=True)
    return {names[number]: place for (place, _), numbers in matched for number in numbers}


def _match(limit_s: int) -> None:
    """Read expressions and names as JSON; write the numbers of the names that an expression matches first, a line each.

    After `limit_s` of processor time the system kills the process.
    """
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
    expressions, names = json.load(sys.stdin)
    left = dict(enumerate(names))
    for expression in expressions:
        match = re.compile(expression).match
        found = [number for number, name in left.items() if match(name)]
        for number in found:
            del left[number]
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _match(int(sys.argv[1]))
