"""Tables of the router alone: delays of streams, memory, and the cost of prompts of token ids."""

import re
from collections.abc import Sequence

from benchmarks.tables.cells import Cell, Line, TableData, own
from deploy.bench.results import Row

TWO_CORES = "2 x AMD EPYC"
STREAMS = re.compile(r"8 streams at 10 ms beside (.+)")
MEMORY = re.compile(r"router beside (.+)")
IDS = re.compile(r"a prompt of (\d+) ids")
STAGES = {
    "the body is read": "read_min",
    "read as any JSON": "read_as_json_min",
    "by way of another process": "read_elsewhere_min",
    "a message for the worker": "send_min",
    "read by the worker": "receive_min",
    "keys of its blocks": "keys_min",
    "keys, where nothing of it was seen": "keys_of_new_text_min",
}


def router(hardware: str, cores: str, rows: Sequence[Row]) -> TableData:
    """Make a table of streams' delays by other clients' requests, and of the router's throughput."""
    columns = {
        "longest gap, ms": "gap_max",
        "slowest /live, ms": "live_max",
        "answers/s": "request_throughput",
    }
    found = _beside(STREAMS, hardware, rows)
    lines: list[Line] = [(load, [cells.get(name) for name in columns.values()]) for load, cells in found.items()]
    subject = f"a router on {cores} cores that clients and workers share; 8 streams of a token every 10 ms"
    return TableData(subject, "beside", list(columns), lines)


def router_memory(rows: Sequence[Row]) -> TableData:
    """Make a table of the memory of the router's processes, at the peak of the sum."""
    columns = {
        "all, RSS": "rss",
        "all, PSS": "pss",
        "router": "pss_router",
        "reads long bodies": "pss_reader_main",
        "grammars": "pss_grammar_main",
        "templates": "pss_template_main",
    }
    found = _beside(MEMORY, TWO_CORES, rows)
    lines: list[Line] = [(load, [cells.get(name) for name in columns.values()]) for load, cells in found.items()]
    return TableData("MB; processes by PSS; a router on two cores", "beside", list(columns), lines)


def prompt_ids(rows: Sequence[Row]) -> TableData:
    """Make a table of the stages of reading a prompt of token ids."""
    found = _beside(IDS, TWO_CORES, rows)
    lines: list[Line] = [
        (stage, [cells.get(figure) for cells in found.values()]) for stage, figure in STAGES.items() if found
    ]
    columns = [f"{int(count):,} ids" for count in found]
    return TableData("µs, the least of 100; on two cores", "stage", columns, lines)


def _beside(workload: re.Pattern[str], hardware: str, rows: Sequence[Row]) -> dict[str, dict[str, Cell]]:
    """Return cells by load and figure, of the newest rows."""
    found: dict[str, dict[str, Cell]] = {}
    for row in rows:
        if (match := workload.fullmatch(row.workload)) and row.hardware == hardware:
            found.setdefault(match[1], {})[row.figure] = own(row)
    return found
