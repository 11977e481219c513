"""Long lists of token ids in JSON, read as arrays: a Python object for each id takes four times as long.

Each list is taken out of the text, and a number unforeseeable by clients takes the list's place. A number may stand
wherever a list may. So the rest is valid JSON if the whole was, and parses into arrays where the lists were.
"""

import re
import secrets
import sys
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.base.json_file import Json
from common.wire.values.fields import MAX_INT32
from router.reading.json_body import CHUNK_CHARS, OUTSIDE, STRING, match_end
from router.text.prompts import TokenIds

LEAST_CHARS = 512
"""Length of the shortest lists taken out."""
MAX_BRACKETS = 1100
"""Limit of brackets, enough for all prompts; texts with more are not searched."""
ZERO, COMMA, SPACE = np.uint8(ord("0")), ord(","), " \t\n\r"
POWERS = 10 ** np.arange(1, 10)
BEGIN = re.compile(r"\[[ \t\n\r]*[0-9]")


@dataclass(frozen=True, slots=True)
class Parted:
    """JSON text without long lists; `lists` has the ids by placeholder number."""

    rest: str
    lists: Mapping[str, TokenIds]

    def values(self, loads: Callable[..., Json], name: str) -> Json:
        """Return the parsed text, with arrays for lists; None if a list is outside of field `name`.

        A list may be the field's value, or an item of the value. `loads` is called like `json.loads`, and its errors
        pass through.
        """
        values = loads(self.rest, parse_float=self._list_or_float)
        value = values.get(name) if isinstance(values, dict) else None
        found = value if isinstance(value, list) else [value]
        return values if sum(isinstance(each, array) for each in found) == len(self.lists) else None

    def _list_or_float(self, number: str) -> "TokenIds | float":
        ids = self.lists.get(number)
        return float(number) if ids is None else ids


def part(text: str, max_rest_chars: int = sys.maxsize) -> Parted:
    """Take out all long lists of token ids; none if more than `max_rest_chars` characters would be left."""
    pieces, lists, spans = [], dict[str, TokenIds](), _spans(text)
    secret = secrets.randbits(64)
    taken_to = outside = 0  # the text before `outside` has whole strings only
    if len(text) - sum(end - begin for begin, end in spans) > max_rest_chars:
        return Parted(text, lists)
    for begin, end in spans:
        if begin < outside:
            continue
        outside = match_end(OUTSIDE, text, outside, begin)
        if outside < begin:  # the list is in a string
            outside = match_end(STRING, text, outside, len(text))
        elif (ids := ids_of(text, begin + 1, end - 1)) is not None:
            number = f"0.{secret}{len(lists)}"
            lists[number] = ids
            pieces += [text[taken_to:begin], f" {number} "]
            taken_to = outside = end
    return Parted("".join([*pieces, text[taken_to:]]), lists)


def ids_of(text: str, begin: int, end: int) -> "TokenIds | None":
    """Return the ids between a list's brackets; None unless each is a number from 0 to MAX_INT32."""
    ids = array("i")
    while begin <= end:
        comma = text.find(",", begin + CHUNK_CHARS, end)
        chunk_end = end if comma < 0 else comma
        values = _values(text[begin:chunk_end])
        if values is None:
            return None
        ids.frombytes(values.astype("<i4").tobytes())
        begin = chunk_end + 1
    return ids


def _spans(text: str) -> list[tuple[int, int]]:
    """Return begin and end of long brackets beginning with a digit; none for too many brackets."""
    spans, end = list[tuple[int, int]](), 0
    for _ in range(MAX_BRACKETS):
        position = end
        end = text.find("]", position) + 1
        if not end:
            return spans
        begin = text.rfind("[", position, end)
        if begin >= 0 and end - begin > LEAST_CHARS and BEGIN.match(text, begin):
            spans.append((begin, end))
    return []


def _values(text: str) -> NDArray[np.int64] | None:
    """Return numbers separated by commas, written as JSON does: no sign, no leading zero; else None.

    A comma must stand directly behind each number but the last, because NumPy reads an empty item as 0.
    """
    if not text.isascii() or not (stripped := text.strip(SPACE)):
        return None
    chars = np.frombuffer(stripped.encode("ascii"), np.uint8)
    is_digit, is_comma = chars - ZERO < 10, chars == COMMA
    num_digits, num_commas = np.count_nonzero(is_digit), np.count_nonzero(is_comma)
    num_begins = np.count_nonzero(is_digit[1:] > is_digit[:-1]) + int(is_digit[0])
    num_spaces = sum(np.count_nonzero(chars == ord(each)) for each in SPACE)
    is_even = num_begins == num_commas + 1 == np.count_nonzero(is_digit[:-1] & is_comma[1:]) + int(is_digit[-1])
    if not is_even or num_digits + num_commas + num_spaces < len(chars):
        return None
    values = np.fromstring(stripped, np.int64, num_begins, sep=",")
    if int(values.max()) > MAX_INT32:
        return None
    has_zeros = num_begins + sum(np.count_nonzero(values >= power) for power in POWERS) < num_digits
    return None if has_zeros else values
