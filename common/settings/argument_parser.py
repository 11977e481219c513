"""A command line that guesses the meant option for an unknown option."""

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

RESEMBLANCE = 0.75
"""Least similarity of two names, from 0 to 1, for a guess."""


class ArgumentParser(argparse.ArgumentParser):
    """Parser that refuses unknown arguments, so a subcommand shows its own usage."""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Exit with status 2 if any argument is left over."""
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
"""Holder of a program's subcommands."""
