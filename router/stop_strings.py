"""The field `stop`: strings that end a text, and what may be asked of them."""

from dataclasses import dataclass
from typing import Any

from router.json_rules import is_text, wrong

MAX_STOPS = 4
MAX_STOP_CHARS = 256


@dataclass(frozen=True, slots=True)
class StopStrings:
    """A rule: a string or a list of strings; gives a tuple."""

    @property
    def wants(self) -> str:
        return f"a string or a list of at most {MAX_STOPS} strings"

    @property
    def schema(self) -> dict[str, Any]:
        text = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
        return {"anyOf": [text, {"type": "array", "items": text, "maxItems": MAX_STOPS}]}

    def checked(self, name: str, value: Any) -> tuple[str, ...]:
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or len(stops) > MAX_STOPS:
            raise wrong(name, value, self.wants)
        for stop in stops:
            if not is_text(stop) or not 1 <= len(stop) <= MAX_STOP_CHARS:
                raise wrong(name, stop, f"strings of 1 to {MAX_STOP_CHARS} characters")
        return tuple(stops)
