"""Parts of grammars that depend on the model's tokens."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from router.text.formats.parts import SHORT_ID_CHARS
from router.text.formats.shapes import NEW_ID

ID = f"/[a-zA-Z0-9]{{{SHORT_ID_CHARS}}}/"


@dataclass(frozen=True)
class Dialect:
    """Properties of the model that grammars depend on.

    Args:
        to_lark: converts a grammar from GBNF to Lark.
        tokens: ids of the tags that are tokens of the model, by tag (`shapes.MARKS`).
    """

    to_lark: Callable[[str], str]
    tokens: Mapping[str, int] = field(default_factory=dict)

    def written(self, text: str) -> str:
        """Return a fixed text as written in a rule: quoted texts, tokens, and patterns of new ids."""
        return " ".join(self._piece(piece) for piece in self._named.split(text) if piece)

    def text_before(self, mark: str, rule: str, text: str, max_tokens: int | None = None) -> str:
        """Return two rules: `rule` for a text ended by the mark, `text` for a text without the mark.

        Args:
            max_tokens: limit of the text before the mark.

        Raises:
            ValueError: for a limit if the mark is no token, because only a token can interrupt a text.
        """
        anything = r"/(.|\n)*/"
        none = f"{text}: {anything} & ~/(.|\\n)*{escaped(re.escape(mark))}(.|\\n)*/\n"
        if max_tokens is not None:
            if mark not in self.tokens:
                raise ValueError(f"thinking_token_budget: {mark} is no token of this model; leave the budget out")
            end = self.written(mark)
            return f"{rule}: {rule}_before {end}\n{rule}_before[max_tokens={max_tokens}]: {text}\n{none}"
        if mark in self.tokens:
            return f"{rule}: {text} {self.written(mark)}\n{none}"
        return f"{rule}[suffix={json.dumps(mark)}]: {anything}\n{none}"

    def _piece(self, piece: str) -> str:
        if piece == NEW_ID:
            return ID
        token = self.tokens.get(piece)
        return json.dumps(piece, ensure_ascii=False) if token is None else f"<[{token}]>"

    @cached_property
    def _named(self) -> re.Pattern[str]:
        """Expression that splits a text around all pieces other than plain text."""
        return re.compile(f"({'|'.join(map(re.escape, (*self.tokens, NEW_ID)))})")


def escaped(regex: str) -> str:
    """Escape a regular expression for use between slashes; existing escapes stay."""
    pieces: list[str] = []
    characters = iter(regex)
    for character in characters:
        if character == "\\":
            pieces.append(character + next(characters, ""))
        else:
            pieces.append({"/": r"\/", "\n": r"\n", "\r": r"\r"}.get(character, character))
    return "".join(pieces)
