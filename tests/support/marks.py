"""Marks of parametrized cases, by which `make check`, `make test` and `make test-all` choose."""

from collections.abc import Iterable
from typing import Any

import pytest


def first_then(mark: pytest.MarkDecorator, cases: Iterable[Any], *, is_row: bool = False) -> list[Any]:
    """Return the cases, all but the first with the mark: one case proves the behaviour, all prove its bounds.

    A case of a parametrization with several names is a row (`is_row`), with a value for each name.
    """
    first, *others = cases
    return [first, *(pytest.param(*(case if is_row else (case,)), marks=mark) for case in others)]
