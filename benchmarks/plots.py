"""Draws the plots of the benchmark page from the rows of results.csv.

    python -m benchmarks.plots [--results benchmarks/results.csv] [--out benchmarks/plots]

A plot with missing rows is skipped with a message. Of several rows for a figure the last counts. Equal rows give equal
bytes, so a changed file means changed figures.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import offset_copy

from benchmarks.plot_data import BESIDE_PANELS, Beside, MissingRows, Scaling, beside, mps_caps, scaling, step_times
from benchmarks.tables.cells import RESULTS, results
from deploy.bench.origin import ROOT
from deploy.bench.plot_style import COLOURS, GREY, STYLE, save
from deploy.bench.results import Row


def draw_steps(rows: Sequence[Row]) -> Figure:
    """Draw decode step against batch: a line for each context, and the read floor below."""
    data = step_times(rows)
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.add_subplot()
    for colour, (context, points) in zip(COLOURS, data.by_context.items(), strict=False):
        batches = [batch for batch, _, _ in points]
        axes.plot(batches, [step for _, step, _ in points], marker="o", color=colour)
        axes.plot(batches, [floor for _, _, floor in points], linestyle=(0, (4, 3)), linewidth=1.2, color=colour)
        _label(figure, axes, f"{context:,}", (batches[-1], points[-1][1]), colour)
    axes.plot([], [], marker="o", color=GREY, label="measured")
    axes.plot([], [], linestyle=(0, (4, 3)), linewidth=1.2, color=GREY, label="read floor: weights and KV once")
    figure.legend(loc="outside lower center", ncols=2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _plain_ticks(axes, "x", sorted({batch for points in data.by_context.values() for batch, _, _ in points}))
    _plain_ticks(axes, "y", [1, 2, 3, 5, 10, 20, 30, 50, 100, 200])
    axes.margins(x=0.04)
    axes.set(xlabel="sequences in the batch", ylabel="ms")
    _title(figure, "Decode step by batch, a line for each number of tokens of context", data.subject)
    return figure


def draw_mps(rows: Sequence[Row]) -> Figure:
    """Draw TTFT and ITL against prefill's share of the GPU: a line for each load."""
    data = mps_caps(rows)
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True)
    for axes, (title, by_load) in zip(panels, data.panels.items(), strict=True):
        for colour, (load, points) in zip(COLOURS, by_load.items(), strict=False):
            axes.plot([cap for cap, _ in points], [value for _, value in points], marker="o", color=colour, label=load)
        axes.set(xlabel="SMs that prefill may use, %", ylabel="ms", title=title)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(FixedLocator(data.caps))
        axes.set_xlim(min(data.caps) - 4, max(data.caps) + 4)
    panels[0].legend(loc="upper right")
    _title(figure, "Prefill and decode on one GPU", data.subject)
    return figure


def draw_scaling(rows: Sequence[Row]) -> Figure:
    """Draw output tokens a second by number of workers."""
    data: Scaling = scaling(rows)
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(data.values))
    bars = axes.bar(places, list(data.values.values()), width=0.6, color=COLOURS[0])
    axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    axes.set_xticks(places, [f"{prefill} prefill\n{decode} decode" for prefill, decode in data.values])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.12)
    axes.set_ylabel("output tokens/s")
    _title(figure, "Throughput by workers, one a GPU", data.subject)
    return figure


def draw_beside(rows: Sequence[Row]) -> Figure:
    """Draw two systems under equal loads: a panel for each figure."""
    data: Beside = beside(rows)
    figure = Figure(figsize=(11, 1.2 + 0.55 * len(data.workloads)), layout="constrained")
    panels = figure.subplots(1, len(BESIDE_PANELS), sharey=True)
    for axes, panel in zip(panels, BESIDE_PANELS, strict=True):
        for colour, shift, system in ((COLOURS[0], -0.19, data.ours), (COLOURS[1], 0.19, data.theirs)):
            found = [(i, data.value(load, system, panel.figure)) for i, load in enumerate(data.workloads)]
            drawn = [(i, value) for i, value in found if value is not None]
            bars = axes.barh([i + shift for i, _ in drawn], [v for _, v in drawn], 0.34, color=colour, label=system)
            axes.bar_label(bars, [_short(value) for _, value in drawn], padding=2, fontsize=8)
        axes.set_title(panel.title)
        axes.set_xlabel(panel.better, color=GREY)
        axes.grid(visible=False)
        axes.xaxis.set_major_locator(NullLocator())
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.margins(x=0.22)
    panels[0].set_yticks(range(len(data.workloads)), [_load_name(load) for load in data.workloads])
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    names = [label.replace("baton", "Baton").replace("vllm", "vLLM") for label in labels]
    figure.legend(handles, names, loc="outside lower center", ncols=2)
    _title(figure, "The same load on the same GPU", f"{data.subject}, input/output tokens")
    return figure


PLOTS: dict[str, Callable[[Sequence[Row]], Figure]] = {
    "decode_step": draw_steps,
    "mps_cap": draw_mps,
    "workers": draw_scaling,
    "beside_vllm": draw_beside,
}


def _title(figure: Figure, idea: str, subject: str) -> None:
    figure.suptitle(f"{idea}\n{subject}", x=0.01, ha="left", fontsize=10)


def _load_name(load: str) -> str:
    """Name a load on the page: `concurrency 8, 1024/128` becomes `8 streams, 1024/128`."""
    load = re.sub(r"^concurrency (\d+)", r"\1 streams", load)
    return re.sub(r"^1 streams", "1 stream", load).replace("at once", "all at once")


def _label(figure: Figure, axes: Axes, text: str, point: tuple[float, float], colour: str) -> None:
    """Write a line's name at its end, instead of a legend."""
    shifted = offset_copy(axes.transData, figure, x=8, units="points")
    axes.text(
        *point, text, transform=shifted, va="center", color=colour, fontsize=9,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )  # fmt: skip


def _plain_ticks(axes: Axes, which: str, values: Sequence[float]) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator(values))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plots", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="rows to draw")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "plots", help="directory to write to")
    parser.add_argument("--format", choices=("svg", "png"), default="svg", help="(default: svg)")
    args = parser.parse_args(argv)
    rows = results(args.results)
    args.out.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for name, draw in PLOTS.items():
            path = args.out / f"{name}.{args.format}"
            try:
                save(draw(rows), path)
            except MissingRows as missing:
                print(f"{name}: skipped, {missing}")
            else:
                print(f"{name}: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
