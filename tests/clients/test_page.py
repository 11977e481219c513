"""The page says of every client what was seen, with the version that is pinned."""

from tests.clients.__main__ import PAGE
from tests.clients.cases import CASES


def test_the_page_has_a_line_for_each_client_and_none_failed() -> None:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][1:]
    beginnings = [f"| {case.name} | {' '.join(case.requirements)} | {case.does} | " for case in CASES]
    assert [line[: len(begin)] for line, begin in zip(lines, beginnings, strict=True)] == beginnings
    assert not any("failed" in line for line in lines)
