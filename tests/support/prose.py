"""Check how docstrings read: `python -m tests.support.prose [PATH ...]`, by default all of the product.

A docstring opens with a verb, or with the noun being defined. Sentences have at most 25 words. Words without a subject,
such as pronouns, are rare. Each finding is a line. Exit status 1 means too many findings.
"""

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PRODUCT = ("router", "prefill_worker", "decode_worker", "common", "deploy", "benchmarks")
OPENERS = frozenset(
    ["Of", "That", "What", "Those", "As", "One", "Who", "Whose", "Whether", "Where", "How", "When", "Which"]
)
VAGUE = re.compile(
    r"\b(it|its|they|them|their|this|that|these|those|one|who|whom|what|somebody|nobody|anybody|everybody)\b",
    re.IGNORECASE,
)
MAX_WORDS = 25
MAX_VAGUE = 35
"""Words that name no subject, of 1,000 words of docstrings."""
MAX_LONG = 60
"""Sentences over `MAX_WORDS`, in all docstrings."""


class Docstring(NamedTuple):
    """A docstring and its place in the tree."""

    where: str
    text: str

    @property
    def num_words(self) -> int:
        return len(self.text.split())

    @property
    def num_vague(self) -> int:
        return len(VAGUE.findall(self.text))

    @property
    def opens_badly(self) -> bool:
        return self.text.split()[0].strip("`,.:;") in OPENERS

    def long_sentences(self) -> Iterator[str]:
        """Yield sentences of more than `MAX_WORDS` words."""
        for sentence in re.split(r"(?<=[.!?])\s+", self.text.replace("\n", " ")):
            if len(sentence.split()) > MAX_WORDS:
                yield sentence.strip()


def docstrings(paths: Sequence[Path]) -> Iterator[Docstring]:
    """Yield all docstrings of files, or of all files in folders."""
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                    continue
                if text := ast.get_docstring(node):
                    yield Docstring(f"{file}:{getattr(node, 'lineno', 1)}", text)


def main(arguments: Sequence[str]) -> int:
    """Print findings and sums; return the exit status."""
    found = list(docstrings([Path(path) for path in arguments] or [ROOT / room for room in PRODUCT]))
    bad = [docstring for docstring in found if docstring.opens_badly]
    long = [(docstring, sentence) for docstring in found for sentence in docstring.long_sentences()]
    for docstring in bad:
        print(f"{docstring.where}: opens with {docstring.text.split()[0]!r}: {docstring.text.splitlines()[0]}")
    for docstring, sentence in long:
        print(f"{docstring.where}: {len(sentence.split())} words: {sentence}")
    if arguments:
        for docstring in found:
            if docstring.num_vague > max(1, docstring.num_words * MAX_VAGUE / 1000):
                print(f"{docstring.where}: vague: {', '.join(VAGUE.findall(docstring.text))}")
    vague = 1000 * sum(docstring.num_vague for docstring in found) / max(1, sum(each.num_words for each in found))
    print(f"{len(found)} docstrings: {len(bad)} bad openers, {len(long)} long sentences, {vague:.0f} vague of 1,000")
    return int(bool(bad) or len(long) > MAX_LONG or vague > MAX_VAGUE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
