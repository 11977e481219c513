"""A plot of a run: each request's times, and the distribution of gaps."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from deploy.bench.plot_style import COLOURS, STYLE, save
from deploy.bench.stats import RequestRecord

FEW = 8
"""Points below which the rate has markers, because a bare line would show too little."""


class Seen(NamedTuple):
    """A server's label and records."""

    label: str
    records: Sequence[RequestRecord]


def plot(path: Path, title: str, systems: Sequence[Seen]) -> None:
    """Write a picture in the format of the suffix of `path`."""
    with matplotlib.rc_context(STYLE):
        save(draw(title, systems), path)


def draw(title: str, systems: Sequence[Seen]) -> Figure:
    """Draw four panels, with a colour for each server."""
    figure = Figure(figsize=(9, 6.4), layout="constrained")
    panels = figure.subplots(2, 2)
    for colour, (label, records) in zip(COLOURS, systems, strict=False):
        good = sorted((record for record in records if not record.error), key=lambda record: record.sent_s)
        if good:
            _draw_system(list(panels.flat), good, label, colour)
    titles = ("first token, by when it was sent", "gaps between tokens", "output tokens a second", "requests at work")
    units = (("s", "ms"), ("ms", "% of gaps that are shorter"), ("s", ""), ("s", ""))
    for axes, name, (x, y) in zip(panels.flat, titles, units, strict=True):
        axes.set(title=name, xlabel=x, ylabel=y)
        axes.set_ylim(bottom=0)
        axes.margins(x=0.02)
    panels[1][0].set_xlim(left=0)  # after all is drawn, because a limit ends autoscaling
    if panels[0][0].has_data():
        panels[0][0].legend(loc="upper left")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def _draw_system(panels: Sequence[Axes], good: Sequence[RequestRecord], label: str, colour: str) -> None:
    first, gaps, rate, at_work = panels
    begin_s = good[0].sent_s
    first.plot(
        [record.sent_s - begin_s for record in good], [1e3 * record.ttft_s for record in good],
        linestyle="none", marker="o", markersize=3, alpha=0.6, color=colour, label=label,
    )  # fmt: skip
    ordered = sorted(1e3 * gap for record in good for gap in record.gaps_s)
    gaps.plot(ordered, [100 * (place + 1) / len(ordered) for place in range(len(ordered))], color=colour)
    if ordered:
        shown = 2 * ordered[int(0.99 * (len(ordered) - 1))] or 1
        is_first = gaps.get_autoscalex_on()
        gaps.set_xlim(0, shown if is_first else max(shown, gaps.get_xlim()[1]))
    seconds = Counter(int(time_s - begin_s) for record in good for time_s in record.chunk_times_s)
    marker = "o" if len(seconds) < FEW else ""
    places = range(max(seconds, default=0) + 1)
    rate.plot([place + 0.5 for place in places], [seconds[place] for place in places], color=colour, marker=marker)
    steps = sorted([(record.sent_s, 1) for record in good] + [(record.ended_s, -1) for record in good])
    count, times_s, counts = 0, [], []
    for time_s, change in steps:
        count += change
        times_s.append(time_s - begin_s)
        counts.append(count)
    at_work.plot(times_s, counts, color=colour, drawstyle="steps-post", linewidth=1.2)
