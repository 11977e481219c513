"""A JSON schema as a document, with resolution of `$ref`."""

from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from common.base.json_file import Json
from router.base.json_rules import shown

ROOT = "#"
ANCHORS = ("$anchor", "$dynamicAnchor")
IDS = ("$id", "id")


class Place(NamedTuple):
    """A schema in a document; `path` is its JSON pointer with a leading `#`."""

    path: str
    value: Json

    def at(self, *steps: str | int) -> str:
        """Return the path of a nested value."""
        return "/".join([self.path, *(str(step).replace("~", "~0").replace("/", "~1") for step in steps)])


class Document:
    """The whole schema sent by a client. Nothing is ever fetched."""

    def __init__(self, schema: Json) -> None:
        self.root = Place(ROOT, schema)
        self._base = next((schema[name] for name in IDS if isinstance(schema.get(name), str)), "")
        self._named: dict[str, Place] | None = None

    def resolve(self, reference: str, path: str) -> Place | None:
        """Find the target of a `$ref`.

        Return None for a target outside of the document. Raises ValueError for a missing place inside.
        """
        try:
            uri, fragment = urldefrag(urljoin(self._base, reference))
        except ValueError:  # no valid URI, but generators write such references
            uri, _, fragment = reference.partition("#")
        if uri == urldefrag(self._base).url:
            begin: Place | None = self.root
        else:
            begin = self._names().get(uri) or self._names().get(reference)
        if begin is None or not fragment:
            return begin
        if not fragment.startswith("/"):
            return self._names().get(f"#{fragment}") or self._missing(reference, path)
        return self._at(begin, fragment) or self._missing(reference, path)

    @staticmethod
    def _at(begin: Place, pointer: str) -> Place | None:
        place = begin
        for step in pointer[1:].split("/"):
            value = place.value
            for key in (unquote(step).replace("~1", "/").replace("~0", "~"), step):
                if isinstance(value, dict) and key in value:
                    place = Place(place.at(key), value[key])
                    break
                if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                    place = Place(place.at(key), value[int(key)])
                    break
            else:
                return None
        return place

    @staticmethod
    def _missing(reference: str, path: str) -> None:
        raise ValueError(f"$ref at {path} = {shown(reference)}: nothing is there")

    def _names(self) -> dict[str, Place]:
        """Map places with a name: `#name`, or a URI."""
        if self._named is None:
            self._named = {}
            for place in _objects(self.root):
                for name in (place.value.get(key) for key in IDS):
                    if isinstance(name, str):
                        self._named.setdefault(name, place)
                        self._named.setdefault(urldefrag(_joined(self._base, name)).url, place)
                for name in (place.value.get(key) for key in ANCHORS):
                    if isinstance(name, str):
                        self._named.setdefault(f"#{name}", place)
        return self._named


def _objects(place: Place) -> Iterator[Place]:
    """Yield all objects in a place, outer objects first."""
    pending = [place]
    for each in pending:
        inner = each.value.items() if isinstance(each.value, dict) else enumerate(each.value)
        pending += [Place(each.at(key), value) for key, value in inner if isinstance(value, dict | list)]
        if isinstance(each.value, dict):
            yield each


def _joined(base: str, name: str) -> str:
    try:
        return urljoin(base, name)
    except ValueError:
        return name
