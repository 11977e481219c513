"""One decode step over the first rows of the batch: forward, sample, advance.

On a GPU a step is one captured graph per batch bucket, sampler included; everywhere else, and with
graphs switched off, the same function runs eagerly. Tokens come back through pinned memory: a step
is launched without waiting, and `PendingStep.tokens` waits for that step alone.
"""

import logging
import time
from collections import deque
from typing import Any

import torch
from torch import Tensor

from common.engine import Engine
from common.step_trace import Trace
from decode_worker.batch import DecodeBatch

logger = logging.getLogger(__name__)


def batch_buckets(max_rows: int) -> list[int]:
    """Row counts that graphs are captured for: 1, 2, 4, then multiples of 8, 16 and 32, up to `max_rows`."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 1025, 32)]
    return [*(rows for rows in steps if rows < max_rows), max_rows]


class PendingStep:
    """A launched step whose tokens are on their way to the host."""

    def __init__(self, tokens_cpu: Tensor, event: "torch.cuda.Event | None") -> None:
        self.tokens_cpu = tokens_cpu  # [num_rows] int32
        self.event = event

    def ready(self) -> bool:
        return self.event is None or bool(self.event.query())

    def tokens(self) -> list[int]:
        """The sampled token of each row; waits for the step."""
        if self.event is not None:
            self.event.synchronize()
        tokens: list[int] = self.tokens_cpu.tolist()
        return tokens


class DecodeRunner:
    """Launches steps; the batch's state says what they compute."""

    def __init__(self, engine: Engine, batch: DecodeBatch, max_rows: int, *, use_graphs: bool) -> None:
        self.engine = engine
        self.batch = batch
        self.use_graphs = use_graphs and engine.graph_safe
        self.buckets = batch_buckets(max_rows)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.trace = Trace()
        self.sampled = torch.zeros(max_rows, dtype=torch.int32, device=engine.device)  # [max_rows]
        if engine.device.type == "cuda":
            # Three are enough: one step runs, one is queued, one is being read.
            self.landing = deque(torch.zeros(max_rows, dtype=torch.int32).pin_memory() for _ in range(3))

    def prepare(self) -> None:
        """Compile kernels and capture the graphs, largest first so that all share its memory."""
        if self.engine.device.type != "cuda":
            return
        begin_s = time.monotonic()
        memory = None
        with torch.inference_mode():
            for bucket in sorted(self.buckets, reverse=True):
                self._step(bucket)
                if self.use_graphs:
                    self.graphs[bucket] = self._captured(bucket, memory)
                    memory = memory or self.graphs[bucket].pool()
        torch.cuda.synchronize(self.engine.device)
        how = f"{len(self.graphs)} graphs for 1 to {self.buckets[-1]} rows" if self.graphs else "no graphs"
        logger.info("decode step ready in %.1f s: %s", time.monotonic() - begin_s, how)

    def launch(self, num_rows: int) -> PendingStep:
        """Start a step over the first `num_rows` rows."""
        bucket = next(rows for rows in self.buckets if rows >= num_rows)
        with torch.inference_mode():
            with self.trace.device(num_rows, "rows"):
                if bucket in self.graphs:
                    self.graphs[bucket].replay()
                else:
                    self._step(bucket)
            return self._fetch(num_rows)

    def _step(self, num_rows: int) -> None:
        forward_batch = self.batch.forward_batch(num_rows)
        logits = self.engine.model.forward(forward_batch, self.engine.step_ops)
        next_positions = forward_batch.seq_lens  # of the token to be sampled
        sampled = self.engine.sampler(logits, self.batch.sampling_rows(num_rows), next_positions)
        self.sampled[:num_rows].copy_(sampled)
        self.batch.advance(sampled)

    def _captured(self, num_rows: int, memory: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.engine.device)
        with torch.cuda.graph(graph, pool=memory):
            self._step(num_rows)
        return graph

    def _fetch(self, num_rows: int) -> PendingStep:
        if self.engine.device.type != "cuda":
            return PendingStep(self.sampled[:num_rows].clone(), None)
        landing = self.landing[0]
        self.landing.rotate(-1)
        landing[:num_rows].copy_(self.sampled[:num_rows], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return PendingStep(landing[:num_rows], event)
