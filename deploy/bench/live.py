"""Live progress of a load in a line of the terminal."""

import time
from bisect import insort

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from common.base.percentiles import percentile
from deploy.bench.stats import RequestRecord

SAY_S = 0.2
"""Seconds between two updates, because drawing costs more than noting a request."""


class Live:
    """A progress bar with the figures so far, for a round on a server."""

    def __init__(self, progress: Progress, label: str, num_requests: int) -> None:
        self._progress, self._task = progress, progress.add_task(label, total=num_requests, figures="")
        self._begin_s = self._said_s = time.perf_counter()
        self._ttfts_s: list[float] = []
        self._num_tokens = self._num_errors = 0
        self._num_left = num_requests

    def note(self, record: RequestRecord) -> None:
        """Count an ended request."""
        if record.error:
            self._num_errors += 1
        else:
            insort(self._ttfts_s, record.ttft_s)
            self._num_tokens += record.num_output_tokens
        self._progress.advance(self._task)
        self._num_left -= 1
        now_s = time.perf_counter()
        if now_s - self._said_s > SAY_S or not self._num_left:
            self._said_s = now_s
            self._progress.update(self._task, figures=self.text(now_s - self._begin_s))

    def text(self, elapsed_s: float) -> str:
        """Return the figures after `elapsed_s`."""
        if not self._ttfts_s:
            return f"{self._num_errors} errors" if self._num_errors else ""
        p50, p99 = (1e3 * percentile(self._ttfts_s, percent) for percent in (50, 99))
        errors = f", {self._num_errors} errors" if self._num_errors else ""
        return f"TTFT {p50:,.0f} ms, p99 {p99:,.0f}; {self._num_tokens / elapsed_s:,.0f} tokens/s{errors}"


def progress_on(console: Console) -> Progress:
    """Make the display for `Live`; without a terminal only the last state of each bar is printed."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[figures]}"),
        console=console,
    )
