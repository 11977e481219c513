"""Computation of prompt chunks, and sampling of the token after each finished prompt.

The runner is in `common` because a decode worker computes prompts itself when there is no prefill worker. Up to one or
two thousand tokens, depending on the host, launching kernels takes longer than running them. Such steps replay a graph
captured for the next larger bucket of tokens and sequences. Graphs are confined to the GPU share like steps. A lone
prompt may use the whole GPU, so lone prompts have their own graphs.

A capture takes about 0.1 s. So a worker registers with the graphs of some sizes, and captures the others while idle.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from common.device.engine.engine import Engine
from common.device.engine.gpu_share import GpuShare
from common.device.steps.loop_trace import WAIT, Trace
from common.device.steps.output_ring import Landing, PendingOutput
from common.device.steps.prompt_buffers import PromptBuffers, PromptChunk
from common.device.steps.prompt_scores import PromptScorer, PromptScores
from common.ops.base import ForwardBatch
from common.ops.linear_plan import SHORT_STEPS
from common.ops.prompt_attention import GATHERED_ABOVE
from common.ops.sampler import AdjustedRows
from common.wire.values.output_token import OutputToken

logger = logging.getLogger(__name__)

TOKEN_BUCKETS = (*SHORT_STEPS, 96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024,
                 1152, 1280, 1408, 1536, 1792, 2048)  # fmt: skip
MAX_GRAPH_SEQS = 8
FIRST_TOKENS = (256, 512, 1024)
"""Tokens of the graphs captured before a worker registers, beside the largest, whose memory the others share."""
FEW_TOKENS, MOST_PADDED_TOKENS = 256, 1024
"""Tokens of a graph that any smaller step may replay, and of one that a step of half the tokens may replay."""


class Bucket(NamedTuple):
    """Limits of a graph, and the part of the GPU for its kernels."""

    num_tokens: int
    num_seqs: int
    whole_gpu: bool  # not confined to the share

    @property
    def num_keys(self) -> int:
        """Most keys of all sequences, 0 for any; where keys are gathered, enough for beginnings of prompts."""
        return self.num_tokens if self.num_tokens > GATHERED_ABOVE else 0

    def holds(self, num_tokens: int, num_seqs: int, num_keys: int) -> bool:
        """Tell whether a step of the given size may replay the graph."""
        has_keys = not self.num_keys or num_keys <= self.num_keys
        return num_tokens <= self.num_tokens and num_seqs <= self.num_seqs and has_keys


class PendingPrompts:
    """A launched step; after its end, all KV of its chunks is in the pool."""

    def __init__(self, sampled: PendingOutput, are_last: list[bool], scorer: PromptScorer | None = None) -> None:
        self.sampled = sampled
        self.are_last = are_last
        self.scorer = scorer

    def ready(self) -> bool:
        return self.sampled.ready()

    def tokens(self) -> list[OutputToken | None]:
        """Return the first token after each finished prompt, None for other chunks; waits for the step."""
        pairs = zip(self.sampled.output().rows, self.are_last, strict=True)
        return [row[0] if is_last else None for row, is_last in pairs]

    def scores(self) -> list[PromptScores | None]:
        """Return the scores of each chunk's prompt tokens, None for a chunk without any; call after `tokens`."""
        return [None] * len(self.are_last) if self.scorer is None else self.scorer.scores()


class PromptRunner:
    """Runner of ragged batches of chunks, a single batch at a time.

    Args:
        max_tokens: most tokens of a step.
        max_seqs: most sequences of a step.
        share: part of the GPU for steps; the whole GPU by default.
    """

    def __init__(self, engine: Engine, max_tokens: int, max_seqs: int, share: GpuShare | None = None) -> None:
        self.engine = engine
        vocab, device = engine.vocab_size, engine.device
        self.buffers = PromptBuffers(max_tokens, max_seqs, engine.max_len, engine.pool.shape, vocab, device)
        self.all_counted = torch.full((max_seqs,), -1, dtype=torch.int32, device=device)
        self.landing = Landing(max_seqs, engine.device)
        self.graphs: dict[Bucket, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.missing: list[Bucket] = []  # graphs still to be captured
        self._missed = Counter[Bucket]()  # steps that had no graph of their own
        self.share = share or GpuShare()  # must outlive the graphs captured in the share
        self.trace = Trace()

    def launch(self, chunks: list[PromptChunk], *, whole_gpu: bool = True) -> PendingPrompts:
        """Start a step over the chunks, to run after every step launched before.

        A step with log-probabilities, of the sampled token or of the prompt, is launched without a graph, because
        graphs have no code for log-probabilities. `whole_gpu` allows more than the share, for times without decode
        steps.
        """
        num_tokens, num_seqs = sum(len(chunk.token_ids) for chunk in chunks), len(chunks)
        num_keys = sum(chunk.end for chunk in chunks)
        has_logprobs = any(chunk.has_logprobs for chunk in chunks)
        is_scored = any(chunk.scored for chunk in chunks)
        any_gpu = whole_gpu or self.share.limited is None
        bucket = None if has_logprobs or is_scored else self._bucket(num_tokens, num_seqs, num_keys, whole_gpu=any_gpu)
        with torch.inference_mode(), self.share.stream(whole=whole_gpu):
            self.buffers.fill(chunks, *(bucket[:2] if bucket else (num_tokens, num_seqs)))
            scorer = PromptScorer(chunks, self.engine) if is_scored else None
            self._copy(copy for chunk in chunks for copy in chunk.found_states)
            with self.trace.device(num_tokens, "tokens"):
                if bucket:
                    (graph, sampled), logprobs = self.graphs[bucket], None
                    graph.replay()
                else:
                    batch = self.buffers.forward_batch(
                        num_tokens,
                        num_seqs,
                        max_query_len=max(len(chunk.token_ids) for chunk in chunks),
                        max_seq_len=max(chunk.end for chunk in chunks),
                        num_keys=num_keys,
                    )
                    sampled, logprobs = self._step(batch, has_logprobs=has_logprobs, scorer=scorer)
            self._copy(copy for chunk in chunks for copy in chunk.snapshots)
            pending = self.landing.fetch(sampled[:num_seqs], logprobs)
        return PendingPrompts(pending, [chunk.is_last for chunk in chunks], scorer)

    def run(self, chunks: list[PromptChunk], *, whole_gpu: bool = True) -> list[OutputToken | None]:
        """Launch a step and wait for its tokens."""
        pending = self.launch(chunks, whole_gpu=whole_gpu)
        with self.trace.phase(WAIT):
            return pending.tokens()

    def capture(self, num_tokens: int = TOKEN_BUCKETS[-1]) -> None:
        """Capture a graph for every bucket up to `num_tokens`."""
        self._capture(self._wanted_buckets(num_tokens))

    def capture_first(self) -> None:
        """Capture the graphs that a worker registers with, and leave the others to `capture_ahead`."""
        wanted = self._wanted_buckets()
        first = [bucket for bucket in wanted if bucket.num_tokens in (*FIRST_TOKENS, wanted[0].num_tokens)]
        self.missing = [bucket for bucket in wanted if bucket not in first]
        self._capture(first)

    @property
    def lacked_graphs(self) -> bool:
        """Tell whether a step lacked a graph that is still missing."""
        return any(self._missed[bucket] for bucket in self.missing)

    def capture_ahead(self) -> None:
        """Capture a missing graph, if any is left, first what most steps wanted; call while no step is in flight."""
        if not self.missing:
            return
        bucket = max(self.missing, key=lambda bucket: (self._missed[bucket], bucket))
        self.graphs[bucket] = self._captured(bucket)
        self.missing.remove(bucket)
        if not self.missing:
            logger.info("all %d prompt graphs are ready", len(self.graphs))

    def _capture(self, buckets: Sequence[Bucket]) -> None:
        """Capture graphs, largest first, because all graphs share the memory of the first."""
        begin_s = time.monotonic()
        for bucket in buckets:
            self.graphs[bucket] = self._captured(bucket)
        later = f", {len(self.missing)} to be captured while idle" if self.missing else ""
        logger.info("%d prompt graphs ready in %.1f s%s", len(self.graphs), time.monotonic() - begin_s, later)

    def _copy(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy blocks of the pool, in the order of launches."""
        for source_id, target_id in copies:
            self.engine.pool.copy(source_id, target_id)

    def _wanted_buckets(self, num_tokens: int = TOKEN_BUCKETS[-1]) -> list[Bucket]:
        """Return buckets up to the first that holds `num_tokens`, largest first.

        Buckets for a lone prompt use the whole GPU; buckets for several prompts keep to the share. Several prompts get
        the whole GPU beside a share only in a backlog, with steps too long for a graph.
        """
        buffers, unlimited = self.buffers, self.share.limited is None
        kinds = {(1, True), (min(MAX_GRAPH_SEQS, buffers.max_seqs), unlimited)}
        most = min(
            buffers.max_tokens, next(size for size in TOKEN_BUCKETS if size >= min(num_tokens, TOKEN_BUCKETS[-1]))
        )
        sizes = [size for size in sorted(TOKEN_BUCKETS, reverse=True) if size <= most]
        return [Bucket(size, *kind) for size in sizes for kind in sorted(kinds)]

    def _bucket(self, num_tokens: int, num_seqs: int, num_keys: int, *, whole_gpu: bool) -> Bucket | None:
        """Return the smallest bucket for the step, if any.

        While its graph is missing, return another that is captured and not much larger. None where there is none,
        because kernels launched one by one are faster than much padding.
        """
        fitting = [
            bucket
            for bucket in (*self.graphs, *self.missing)
            if bucket.whole_gpu == whole_gpu and bucket.holds(num_tokens, num_seqs, num_keys)
        ]
        best = min(fitting, default=None)
        if best is None or best in self.graphs:
            return best
        self._missed[best] += 1
        most = max(FEW_TOKENS, min(MOST_PADDED_TOKENS, 2 * num_tokens))
        return min((bucket for bucket in fitting if bucket in self.graphs and bucket.num_tokens <= most), default=None)

    def _step(
        self,
        batch: ForwardBatch,
        *,
        has_logprobs: bool = False,
        scorer: PromptScorer | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return tokens, and words of log-probabilities if requested."""
        logits, num_seqs = self._logits(batch, scorer), len(batch.seq_lens)
        params, positions = self.buffers.sampling(num_seqs)
        unadjusted = logits.clone() if has_logprobs else logits
        rows = AdjustedRows(self.buffers.state_slots(num_seqs), self.all_counted[:num_seqs], positions)
        self.engine.sampler.adjust(logits, params, rows, self.buffers.adjustments.tensors)
        sampled = self.engine.sampler.sample(logits, params, positions)
        if not has_logprobs:
            return sampled, None
        return sampled, self.engine.sampler.logprobs(unadjusted, params.num_logprobs, sampled)

    def _logits(self, batch: ForwardBatch, scorer: PromptScorer | None) -> Tensor:
        """Return logits of each sequence's last token; logits of other tokens exist only while being scored."""
        model, ops = self.engine.model, self.engine.ops
        if scorer is None:
            return model.forward(batch, ops)
        assert batch.last_tokens is not None, "a prompt step wants those"
        x = model.hidden(replace(batch, last_tokens=None), ops)
        scorer.score(x)
        return model.logits(x.of(batch.last_tokens), ops)

    def _captured(self, bucket: Bucket) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture a graph over padding, in the memory of the first graph; a replay reads the buffers."""
        (num_tokens, num_seqs, whole_gpu), first = bucket, next(iter(self.graphs.values()), None)
        with torch.inference_mode(), self.share.stream(whole=whole_gpu):
            self.buffers.fill([], num_tokens, num_seqs)
            batch = self.buffers.forward_batch(
                num_tokens,
                num_seqs,
                max_query_len=num_tokens,
                max_seq_len=self.engine.max_len,
                num_keys=bucket.num_keys,
            )
            self._step(batch)
            torch.cuda.synchronize(self.engine.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, pool=first and first[0].pool(), stream=None if whole_gpu else self.share.limited
            ):
                sampled, _ = self._step(batch)
        return graph, sampled
