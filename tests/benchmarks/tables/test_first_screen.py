"""Claims of README's first screen: each is a click from its runs and their commands, and is what these say."""

import re
from statistics import median

from benchmarks.tables.__main__ import TABLE
from benchmarks.tables.cells import RESULTS, Cell, TableData, results
from benchmarks.tables.loads import SERVING, beside_vllm, deaths, one_long
from deploy.bench.origin import ROOT
from deploy.bench.results import Row, read_rows

README = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Install and serve")[0]
PAGE = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
LINKED = re.compile(r"\[(?P<label>[^]]+)\]\(benchmarks/results\.csv#L(?P<line>\d+)\)")
MEASURED = re.compile(r"\(benchmarks/README\.md#([\w-]+)\)")
SHOWN = re.compile(r"([\d,.]+)(?: \((?P<least>[\d,.]+)-([\d,.]+)\))?")
FIGURE = re.compile(r"([\d,.]*\d) (%|ms|s|GB|tokens/s|sequences)\b")


def table_of(name: str) -> list[list[str]]:
    """Return the cells of a table of README, with its head."""
    (body,) = (match[0] for match in TABLE.finditer(README) if match[2] == name)
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in body.splitlines() if line.startswith("|")]


def section(anchor: str) -> str:
    """Return a section of the page of measurements by its anchor."""
    for heading in re.finditer(r"(?m)^(#+) (.*)$", PAGE):
        if re.sub(r"[^\w\- ]", "", heading[2].lower()).replace(" ", "-") == anchor:
            end = re.compile(rf"(?m)^#{{1,{len(heading[1])}}} ").search(PAGE, heading.end())
            return PAGE[heading.start() : end.start() if end else len(PAGE)]
    raise AssertionError(f"no section {anchor}")


def test_each_load_links_a_run_that_has_its_figures_and_its_command() -> None:
    head, _, *lines = table_of("first-page")
    rows = read_rows(RESULTS)
    assert len(lines) >= 5 and head[1:] == list(SERVING), "also columns in which Baton is behind"
    for label, *cells in lines:
        link = LINKED.fullmatch(label)
        assert link, label
        row = next(row for row in rows if row.line == int(link["line"]))
        assert row.command.startswith("python -m benchmarks.serve ") and row.compared_with.startswith("vllm")
        assert link["label"].rpartition(", ")[2] in row.workload
        for name, cell in zip(SERVING.values(), cells, strict=True):
            runs = [each for each in rows if each.figure == name and is_same_load(each, row)]
            sides = ([each.value for each in runs], [each.compared_value for each in runs])
            for text, values in zip(cell.split(" · "), sides, strict=True):
                shown = SHOWN.fullmatch(text.strip("*"))
                assert shown, text
                assert bool(shown["least"]) == (len(values) > 1), (label, name)
                told = (median(values), min(values), max(values))
                for figure, value in zip(shown.groups(), told, strict=True):
                    digits = len((figure or "").partition(".")[2])
                    assert not figure or abs(float(figure.replace(",", "")) - value) <= 0.5000001 * 10**-digits


def is_same_load(row: Row, of: Row) -> bool:
    """Tell whether a run differs from another by its seed at most."""
    keys = ("commit", "hardware", "system", "started_by", "compared_with", "model", "workload")
    return all(getattr(row, key) == getattr(of, key) for key in keys)


def test_each_figure_of_its_text_is_in_a_section_that_the_text_links() -> None:
    text = TABLE.sub("", README[README.index("## Beside vLLM") :])
    linked = " ".join(" ".join(section(anchor) for anchor in MEASURED.findall(text)).split())
    said = FIGURE.findall(" ".join(text.split()))
    assert said
    for number, unit in said:
        assert re.search(rf"\b{re.escape(number)} {unit}", linked), f"{number} {unit}"


def test_each_promise_links_where_it_was_measured() -> None:
    promises = [line.split("**")[1] for line in README.splitlines() if line.startswith("- **")]
    text = README[: README.index("```")]
    for promise, said in zip(promises, text.split("- **")[1:], strict=True):
        assert "API" in promise or all("|---|" in section(anchor) for anchor in MEASURED.findall(said)), promise
        assert "API" in promise or MEASURED.search(said), promise


def is_claimed(text: str) -> bool:
    return text in " ".join(README.split())


def column(data: TableData, place: int) -> list[Cell]:
    return [cell for _, cells in data.lines if (cell := cells[place])]


def is_behind(cell: Cell) -> bool:
    return cell.other is not None and cell.other < cell.value


def test_the_first_gap_of_the_other_is_shorter_with_few_streams() -> None:
    assert is_claimed("vLLM's median first gap is shorter with few streams")
    data = beside_vllm(results())
    place = data.columns.index("first gap p50, ms")
    few = [cells[place] for label, cells in data.lines if label.startswith(("one stream", "8 streams"))]
    assert len(few) == 5 and all(cell and is_behind(cell) for cell in few)


def test_the_other_leads_in_several_99th_percentiles() -> None:
    assert is_claimed("vLLM also leads in several 99th percentiles")
    data = beside_vllm(results())
    tails = [cell for place, name in enumerate(data.columns) if "p99" in name for cell in column(data, place)]
    assert 3 <= sum(map(is_behind, tails)) < len(tails) / 2


def test_gaps_beside_a_long_prompt_are_shorter_at_the_99th_percentile() -> None:
    assert is_claimed("Short gaps beside long prompts")
    data = one_long(results())
    assert data.columns[1:3] == ["it is computed: p50", "p99"]
    assert len(column(data, 2)) == 3 and not any(map(is_behind, column(data, 2)))


def test_deaths_cost_a_pause_of_seconds() -> None:
    assert is_claimed("Deaths cost a pause, not a request")
    pauses = column(deaths(results()), 0)
    assert len(pauses) == 2 and all(cell.row.unit == "ms" and cell.value < 10_000 for cell in pauses)
