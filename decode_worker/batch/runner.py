"""Runner of decode steps over the first rows of the batch: forward, sample, advance.

On a GPU a step is a captured graph per batch bucket, sampler included. Elsewhere, or with graphs switched off, the
function runs eagerly. A step is launched without waiting, and `PendingOutput.output` waits for that step alone.
"""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from common.device.engine.engine import Engine
from common.device.engine.step_rules import MIN_SPARED_BYTES, batch_buckets
from common.device.steps.loop_trace import Trace
from common.device.steps.output_ring import PendingOutput, RingLanding
from common.kernels.attention.shared_parts import MAX_SHARING_ROWS
from common.ops.sampler import AdjustedRows
from decode_worker.batch.batch import DecodeBatch
from decode_worker.sequences.rows import Clear

logger = logging.getLogger(__name__)

CAPTURE_BYTES = 400 << 30
"""Bytes that a GPU reads in the time of a capture; with more missed, a capture pays."""


class StepKind(NamedTuple):
    """Properties of a step with a graph of its own."""

    num_rows: int
    has_logprobs: bool = False  # some row asks for log-probabilities
    shares_prefixes: bool = False  # shared blocks are read once


class DecodeRunner:
    """Launcher of steps; the batch's state determines the computation.

    Args:
        use_graphs: capture steps where possible.
        share_prefixes: read shared blocks once where operations can.
    """

    def __init__(
        self, engine: Engine, batch: DecodeBatch, max_rows: int, *, use_graphs: bool, share_prefixes: bool = True
    ) -> None:
        self.engine = engine
        self.batch = batch
        self.use_graphs = use_graphs and engine.graph_safe
        self.shares_prefixes = share_prefixes and engine.step_ops.shares_prefixes
        self.buckets = batch_buckets(max_rows)
        self.graphs: dict[StepKind, torch.cuda.CUDAGraph] = {}
        self.spared_bytes = 0  # by all steps so far
        self._missed_bytes = Counter[StepKind]()  # by kind, missed for want of a graph
        self.landing = RingLanding(max_rows, engine.device)
        self.trace = Trace()

    def prepare(self, sizes: Sequence[int] | None = None) -> None:
        """Compile kernels, and capture graphs of some sizes; see `run_sizes`.

        Args:
            sizes: rows of these steps; None for `first_sizes`.
        """
        if self.engine.device.type != "cuda":
            return
        begin_s = time.monotonic()
        self.batch.apply([Clear(0)])  # compiles the kernel
        self.run_sizes(self.first_sizes if sizes is None else sizes)
        torch.cuda.synchronize(self.engine.device)
        how = f"{len(self.graphs)} graphs for 1 to {self.buckets[-1]} rows" if self.graphs else "no graphs"
        logger.info("decode step ready in %.1f s: %s", time.monotonic() - begin_s, how)

    @property
    def first_sizes(self) -> list[int]:
        """Rows of the graphs captured before the worker registers: powers of two and the largest size.

        A step of another size replays the next larger graph, of at most twice the rows, until the worker was idle.
        """
        if not self.use_graphs:
            return self.buckets
        return [rows for rows in self.buckets if rows.bit_count() == 1 or rows == self.buckets[-1]]

    def run_sizes(self, sizes: Sequence[int]) -> None:
        """Run a step of each size, and capture its graph, largest first because all share the first graph's memory."""
        for rows in sorted(sizes, reverse=True):
            self._launch(rows, StepKind(rows))

    def capture_ahead(self) -> None:
        """Capture a missing graph, if any is left, plain steps first; takes about 0.1 s, so call while idle.

        Call with empty rows only, because a step is run.
        """
        if not self.use_graphs:
            return
        plain = map(StepKind, reversed(self.buckets))
        wanted = [*plain, *self._sharing_kinds(), *(StepKind(rows, has_logprobs=True) for rows in self.buckets)]
        if (kind := next((kind for kind in wanted if kind not in self.graphs), None)) is not None:
            self._launch(kind.num_rows, kind)

    def launch(self, num_rows: int, *, has_logprobs: bool = False, spared_bytes: int = 0) -> PendingOutput:
        """Start a step over the first `num_rows` rows.

        Args:
            spared_bytes: KV bytes spared by reading each shared prefix once.
        """
        kind = StepKind(next(rows for rows in self.buckets if rows >= num_rows), has_logprobs)
        if self._shares(kind, spared_bytes):
            kind = kind._replace(shares_prefixes=True)
            self.spared_bytes += spared_bytes
        elif not has_logprobs:
            kind = self._captured_for(kind)
        return self._launch(num_rows, kind)

    def _captured_for(self, kind: StepKind) -> StepKind:
        """Return the smallest captured kind of plain steps that holds `kind`, or `kind` if none does."""
        if kind in self.graphs:
            return kind
        holding = (each for each in self.graphs if each == StepKind(each.num_rows) and each.num_rows >= kind.num_rows)
        return min(holding, default=kind)

    def _sharing_kinds(self) -> list[StepKind]:
        """Return kinds of steps that read shared prefixes once, by rows."""
        return [StepKind(rows, shares_prefixes=True) for rows in self.buckets if self._may_share(rows)]

    def _may_share(self, num_rows: int) -> bool:
        return self.shares_prefixes and 1 < num_rows <= MAX_SHARING_ROWS

    def _shares(self, kind: StepKind, spared_bytes: int) -> bool:
        """Tell whether a step should read prefixes once.

        A graph is captured only after steps without the graph have missed `CAPTURE_BYTES`.
        """
        if kind.has_logprobs or not self._may_share(kind.num_rows) or spared_bytes < MIN_SPARED_BYTES:
            return False
        sharing = kind._replace(shares_prefixes=True)
        if not self.use_graphs or sharing in self.graphs:
            return True
        self._missed_bytes[sharing] += spared_bytes
        return self._missed_bytes[sharing] >= CAPTURE_BYTES

    def _launch(self, num_rows: int, kind: StepKind) -> PendingOutput:
        """Launch a step; the first of a kind runs kernel by kernel, followed by the capture of its graph."""
        graph = self.graphs.get(kind)
        with self.trace.device(num_rows, "rows"):
            if graph is not None:
                graph.replay()
            else:
                self._step(kind)
        pending = self.landing.launched(num_rows, kind.num_rows, has_logprobs=kind.has_logprobs)
        self.batch.words.launched()
        if self.use_graphs and graph is None:
            self.graphs[kind] = self._captured(kind)
        return pending

    @torch.inference_mode()
    def _step(self, kind: StepKind) -> None:
        num_rows, sampler = kind.num_rows, self.engine.sampler
        forward_batch = self.batch.forward_batch(num_rows, shares_prefixes=kind.shares_prefixes)
        logits = self.engine.model.forward(forward_batch, self.engine.step_ops)
        sampling = self.batch.state.sampling.rows(num_rows)
        unadjusted = logits.clone() if kind.has_logprobs else logits
        slots, adjustments = self.batch.state.state_slots[:num_rows], self.batch.adjustments.tensors
        rows = AdjustedRows(slots, forward_batch.token_ids, forward_batch.seq_lens)
        sampler.adjust(logits, sampling, rows, adjustments, self.batch.grammars)
        sampler.sample_and_advance(logits, sampling, forward_batch, self.landing.ring)
        if kind.has_logprobs:
            sampler.land_logprobs(unadjusted, sampling, forward_batch.token_ids, self.landing.logprob_ring)

    @torch.inference_mode()
    def _captured(self, kind: StepKind) -> torch.cuda.CUDAGraph:
        """Capture a step; all graphs share the memory of the first, the largest."""
        graph, first = torch.cuda.CUDAGraph(), next(iter(self.graphs.values()), None)
        torch.cuda.synchronize(self.engine.device)
        with torch.cuda.graph(graph, pool=first.pool() if first else None):
            self._step(kind)
        return graph
