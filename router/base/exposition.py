"""Prometheus's text format, some samples in each turn of the event loop: streams go on while a large fleet is told.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

from prometheus_client import Metric
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
number: Callable[[float], str] = floatToGoString
"""As Prometheus writes it."""
SAMPLES_A_TURN = 200
"""Written in half a millisecond."""
IN_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})
IN_LABELS = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


async def exposition(families: Iterable[Metric]) -> bytes:
    """All of them; each is what it was when it was its turn."""
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
        if not sample.name.endswith("_created"):  # when the router started, which nobody asks of each
            yield f"{sample.name}{_labels(sample.labels)} {number(sample.value)}\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join([f'{name}="{value.translate(IN_LABELS)}"' for name, value in sorted(labels.items())]) + "}"
