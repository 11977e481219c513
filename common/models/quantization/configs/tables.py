"""Typed look-ups in the table of a quantized checkpoint; errors name file, key, value and what is supported."""

import re
from dataclasses import dataclass
from typing import NoReturn

from common.base.errors import ModelError
from common.base.json_file import Json, JsonObject
from common.models.quantization.rules import Match, Rule

PLAIN = "serve a checkpoint of this model in 16 bits, or in a format that docs/models.md lists"


@dataclass(frozen=True, slots=True)
class Table:
    """A JSON object, and the place where it stands."""

    content: JsonObject
    where: str

    @staticmethod
    def of(content: Json, where: str) -> "Table":
        """Return a table; raises ModelError for another value than an object."""
        if not isinstance(content, dict):
            raise ModelError(f"{where}: {content!r:.80} is not supported, an object is needed; fetch the model again")
        return Table(content, where)

    def get(self, *keys: str) -> Json:
        """Return the value of the first key that has one; None for none."""
        return next((self.content[key] for key in keys if self.content.get(key) is not None), None)

    def table(self, key: str) -> "Table":
        """Return an object inside, empty for none."""
        return Table.of(self.content.get(key) or {}, f"{self.where}: {key}")

    def names(self, *keys: str) -> list[str]:
        """Return a list of names, empty for none; raises ModelError for another value."""
        value = self.get(*keys) or []
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ModelError(f"{self.where}: {keys[0]} = {value!r:.200}, a list of names is needed")
        return value

    def whole(self, *keys: str, default: int | None = None) -> int:
        """Return a whole number; raises ModelError for another value."""
        value = self.get(*keys)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelError(f"{self.where}: {keys[0]} = {value!r:.80}, a whole number is needed")
        return value

    def group(self, *keys: str, default: int | None = None) -> int:
        """Return the elements of a row that share a scale, 0 for all, which is stored as -1; raises ModelError."""
        size = self.whole(*keys, default=default)
        if size < 1 and size != -1:
            raise ModelError(
                f"{self.where}: {keys[0]} = {size}, a number of elements is needed, or -1 for all of a row"
            )
        return max(size, 0)

    def block(self, key: str) -> tuple[int, int] | None:
        """Return the rows and columns of a block; None for no blocks. Raises ModelError for another value."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, list) and len(value) == 2 and all(type(each) is int and each > 0 for each in value):
            return value[0], value[1]
        raise ModelError(f"{self.where}: {key} = {value!r:.80}, a list of rows and columns is needed")

    def only(self, key: str, *supported: Json, default: Json = None) -> Json:
        """Return a value; raises ModelError unless it is one of `supported`."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool | int | str | None | list) and value in supported:
            return value
        self.refuse(f"{key} = {value!r:.200} is", " or ".join(repr(each) for each in supported))

    def refuse(self, what: str, supported: str) -> NoReturn:
        """Raise ModelError for what a checkpoint has and nobody reads."""
        raise ModelError(f"{self.where}: {what} not supported, only {supported}; {PLAIN}")

    def pattern(self, text: str) -> str:
        """Return a regular expression; raises ModelError for another text."""
        try:
            re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise ModelError(f"{self.where}: {text!r:.80} is no regular expression ({error})") from None
        return text

    def unquantized(self, match: Match, *keys: str) -> list[Rule]:
        """Return rules of the modules that a list leaves as they are."""
        return [Rule(match, name, None) for name in self.names(*keys)]
