"""A command line that guesses what an option which it does not know was meant to be."""

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

RESEMBLANCE = 0.75
"""Of 1: below that two names have little in common."""


class ArgumentParser(argparse.ArgumentParser):
    """One that refuses what it does not know by itself: a command says so with its own usage, not that of them all."""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Exits with status 2 where anything is left over."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._guess(unknown)}")
        return known, unknown

    def _guess(self, unknown: Sequence[str]) -> str:
        names = [argument.partition("=")[0] for argument in unknown]
        meant = [difflib.get_close_matches(name, self._option_string_actions, 1, RESEMBLANCE) for name in names]
        guesses = [guess for guess, *_ in filter(None, meant)]
        return f"; did you mean {' '.join(guesses)}?" if guesses else "; --help lists what there is"


Commands: TypeAlias = "argparse._SubParsersAction[ArgumentParser]"
"""Where a program with several adds one."""
