"""Style of all plots, and the way to a file."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

# Colours by Okabe and Ito, distinguishable with any colour vision, without the faint ones.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
GREY = "#8C8C8C"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "baton",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "legend.frameon": False,
    "xtick.color": "#404040",
    "ytick.color": "#404040",
}


def save(figure: Figure, path: Path) -> None:
    """Write an SVG (or the suffix's format) without date and creator, so that equal plots are equal files."""
    metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
    figure.savefig(path, facecolor="white", metadata=metadata)
