"""Prometheus's text format, written in slices of the event loop, so streams continue while a large fleet is reported.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

from prometheus_client import Metric
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
number: Callable[[float], str] = floatToGoString
"""Formats a number for Prometheus."""
SAMPLES_A_TURN = 200
"""Samples a turn of the event loop; written in half a millisecond."""
IN_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})
IN_LABELS = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


async def exposition(families: Iterable[Metric]) -> bytes:
    """Write all metrics; values of different metrics may be from different moments."""
    parts = []
    for family in families:
        lines = _lines(family)
        while some := "".join(islice(lines, SAMPLES_A_TURN)):
            parts.append(some)
            await asyncio.sleep(0)
    return "".join(parts).encode()


def _lines(family: Metric) -> Iterator[str]:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    yield f"# HELP {name} {family.documentation.translate(IN_HELP)}\n# TYPE {name} {family.type}\n"
    for sample in family.samples:
        if not sample.name.endswith("_created"):  # only repeats the router's start time
            yield f"{sample.name}{_labels(sample.labels)} {number(sample.value)}\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join([f'{name}="{value.translate(IN_LABELS)}"' for name, value in sorted(labels.items())]) + "}"
