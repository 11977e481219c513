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
        uri, fragment = urldefrag(_joined(self._base, reference))
        is_own = uri == urldefrag(self._base).url
        begin = self.root if is_own else self._names().get(uri) or self._names().get(reference)
        if begin is None or not fragment:
            return begin
        found = _at(begin, fragment) if fragment.startswith("/") else self._names().get(f"#{fragment}")
        if found is None:
            raise ValueError(f"$ref at {path} = {shown(reference)}: nothing is there")
        return found

    def _names(self) -> dict[str, Place]:
        """Map places with a name: `#name`, or a URI."""
        if self._named is None:
            self._named = {}
            for place in _objects(self.root):
                names = [place.value.get(key) for key in IDS]
                uris = [urldefrag(_joined(self._base, name)).url for name in names if isinstance(name, str)]
                anchors = [f"#{place.value[key]}" for key in ANCHORS if key in place.value]
                for name in (*names, *uris, *anchors):
                    if isinstance(name, str):
                        self._named.setdefault(name, place)
        return self._named


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


def _objects(root: Place) -> Iterator[Place]:
    """Yield all objects in a place, outer objects first."""
    pending = [root]
    for each in pending:
        inner = each.value.items() if isinstance(each.value, dict) else enumerate(each.value)
        pending += [Place(each.at(key), value) for key, value in inner if isinstance(value, dict | list)]
        if isinstance(each.value, dict):
            yield each


def _joined(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError:  # no valid URI, but generators write such references
        return reference
