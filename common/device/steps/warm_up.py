"""Preparation of kernels before a worker registers, so no request pays for a kernel's first use.

A first start spends most of its time on compiling. Kernels compile independently: each operation of a layer runs at
each size class in its own thread. No kernel is compiled twice, even if several threads need the kernel. The results are
thrown away. Later starts find the kernels on disk.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from common.base.errors import ConfigError
from common.device.engine.engine import Engine
from common.device.steps.adjustments import Adjustments, make_grammar_masks
from common.device.steps.output_ring import make_logprob_ring, make_ring
from common.device.steps.prompt_buffers import PromptChunk
from common.device.steps.prompt_runner import PromptRunner
from common.kernels.attention.shared_parts import MAX_SHARING_ROWS
from common.kernels.base.attention_operands import SharedPrefixes
from common.kernels.base.gpu import gpu_of
from common.kernels.base.sampling_operands import SamplingTensors, TokenRing
from common.models.base import Task
from common.ops.base import ForwardBatch, Ops
from common.ops.linear_plan import SHORT_STEPS
from common.ops.sampler import AdjustedRows
from common.wire.values.sampling_params import PADDING, SAMPLING_COLUMNS, SamplingParams


def sampling_tensors(params: Sequence[SamplingParams], device: torch.device) -> SamplingTensors:
    """Build tensors with a row for each of `params`."""
    return SamplingTensors(
        **{
            column.name: torch.tensor(column.values(params), dtype=getattr(torch, column.dtype), device=device)
            for column in SAMPLING_COLUMNS
        }
    )


logger = logging.getLogger(__name__)

MAX_THREADS = 16
MAX_NAMES = 5  # of kernels, in a warning
WARP_SIZE = 32
# A (tokens, sequences) pair for each size class of kernels and plans.
PROMPT_STEPS = ((1, 1), *((count, 1) for count in SHORT_STEPS), (40, 1), (100, 1), (200, 1), (200, 4), (1100, 1))
DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # for products; attention splits contexts differently for every count
SAMPLED_ROWS = (1, 9)
TIMED = 3


def compile_decode_kernels(
    engine: Engine, row_counts: Sequence[int], *, share_prefixes: bool = True, has_file: bool = False
) -> None:
    """Compile every operation of decode steps; see `decode_tasks` and `unpack_kernels`."""
    tasks = decode_tasks(engine, row_counts, share_prefixes=share_prefixes)
    _compile("decode", engine, tasks, has_file=has_file)


def compile_prompt_kernels(engine: Engine, *, has_file: bool = False) -> None:
    """Compile every operation of a prompt step; see `unpack_kernels`."""
    _compile("prompt", engine, prompt_tasks(engine), has_file=has_file)


def decode_tasks(engine: Engine, row_counts: Sequence[int], *, share_prefixes: bool = True) -> list[Task]:
    """Return every operation of decode steps for `row_counts`, slowest compilations first.

    The tasks hold what they run on, which must live until the device is done.

    Args:
        share_prefixes: include steps that read shared prefixes once, where the operations can.
    """
    ops, model, most_rows = engine.step_ops, engine.model, max(row_counts)
    batches = _decode_batches(engine, row_counts, share_prefixes=share_prefixes and ops.shares_prefixes)
    tasks: list[Task] = [task for batch in reversed(batches) for task in model.attention_tasks(ops, batch)]
    rings = {rows: make_ring(rows, engine.device) for rows in _sampled_rows(engine)}
    tasks += [partial(_sample_and_advance, engine, ring) for ring in rings.values()]
    logits, sampling = _logits(engine, 1), sampling_tensors([PADDING], engine.device)
    logprob_ring = make_logprob_ring(rings[1])
    tasks += [  # independent of the count
        lambda: model.embedded(batches[0].token_ids, ops),
        partial(_adjust, engine, most_rows),
        lambda: engine.sampler.land_logprobs(logits, sampling, batches[0].token_ids[:1], logprob_ring),
    ]
    for rows in (rows for rows in DECODE_ROWS if rows < 2 * most_rows):
        tasks += [*model.product_tasks(ops, rows), partial(_logits_of, engine, ops, rows)]
    return tasks


def prompt_tasks(engine: Engine) -> list[Task]:
    """Return every operation of a prompt step."""
    ops, model, position = engine.ops, engine.model, torch.zeros(1, dtype=torch.int32, device=engine.device)
    tasks: list[Task] = [
        task
        for batch in _prompt_batches(engine)
        for of_last in (False, True)
        for task in model.attention_tasks(ops, batch, of_last=of_last)
    ]
    tasks += [
        *(partial(_sample, engine, rows) for rows in _sampled_rows(engine)),
        *(partial(_logits_of, engine, ops, rows) for rows in (1, 2)),  # several alike, whatever the head is in
        partial(_adjust, engine),
        lambda: engine.sampler.logprobs(_logits(engine, 1), position, position),
    ]
    for num_tokens, _ in reversed(PROMPT_STEPS):
        tasks += model.product_tasks(ops, num_tokens)
    return tasks


def _compile(what: str, engine: Engine, tasks: Sequence[Task], *, has_file: bool) -> None:
    """Run the tasks, and log how many kernels were found and compiled."""
    from common.device.steps.kernel_file import counted  # here, so that a process on a CPU loads no triton

    begin_s = time.monotonic()
    with counted() as found:
        run_all(tasks, partial(torch.cuda.set_device, engine.device))
    torch.cuda.synchronize(engine.device)
    num_found, compiled = len(found.on_disk), found.compiled
    ready = "%s kernels ready in %.1f s: %d from disk, %d compiled"
    logger.info(ready, what, time.monotonic() - begin_s, num_found, len(compiled))
    if has_file and compiled:
        names = ", ".join(sorted(set(compiled))[:MAX_NAMES])
        logger.warning("%d %s kernels are not in the file kernels.compiled, as %s", len(compiled), what, names)


def run_all(tasks: Sequence[Task], begin: Callable[[], None] = lambda: None) -> None:
    """Run the tasks in parallel; a kernel needed by several tasks is compiled once while the others wait.

    Args:
        begin: called before each task in the task's thread.
    """
    from triton.runtime import build

    import common.device.steps.kernel_code  # noqa: F401 - waits for the thread that imports it
    from common.device.steps.launchers import OneOfEach, launchers_apart

    threads = min(MAX_THREADS, os.cpu_count() or 1)
    with (
        ThreadPoolExecutor(threads) as compilers,
        OneOfEach(compilers),
        launchers_apart(build),
        ThreadPoolExecutor(threads) as runners,
    ):
        for future in [runners.submit(copy_context().run, _run, begin, task) for task in tasks]:
            future.result()


def unpack_kernels(path: str, device: torch.device) -> bool:
    """Put kernels compiled ahead where Triton finds them; tell whether that was done, and warn if it failed.

    Args:
        path: of a file of kernels; empty for none.
    """
    if not path:
        return False
    from triton.backends.compiler import GPUTarget

    import common.device.steps.kernel_code  # noqa: F401 - has hashes ready
    from common.device.steps.kernel_file import unpack

    begin_s, (major, minor) = time.monotonic(), gpu_of(device).capability
    try:
        unpacked = unpack(Path(path), GPUTarget("cuda", 10 * major + minor, WARP_SIZE))
    except ConfigError as error:
        logger.warning("kernels are compiled here, because %s", error)
        return False
    if unpacked.refused:
        logger.warning("extensions in C are built here, because %s has those for %s", path, unpacked.refused)
    counts, took_s = (unpacked.num_kernels, unpacked.num_extensions), time.monotonic() - begin_s
    logger.info("%d kernels and %d extensions in C of %s unpacked in %.2f s", *counts, path, took_s)
    return True


def warm_up_prompts(runner: PromptRunner) -> None:
    """Run the longest prompt and a batch of two, with every sampling filter, so cuBLAS and memory are ready too.

    cuBLAS workspaces and cached memory belong to a stream, so the longest prompt runs on each stream of steps. The
    kernels of the batch are the same on both.
    """
    engine = runner.engine
    longest = min(runner.buffers.max_tokens, engine.max_len)
    for whole_gpu in (True,) if runner.share.limited is None else (True, False):
        _run_prompts(runner, [longest], whole_gpu)
        if whole_gpu and longest >= 4 and runner.buffers.max_seqs > 1:
            _run_prompts(runner, [longest // 2, longest // 2 - 1], whole_gpu)


def time_prompt(runner: PromptRunner, num_tokens: int) -> float:
    """Return the seconds of a step for a lone prompt of `num_tokens`; kernels must be ready."""
    times_s = []
    for _ in range(TIMED):
        begin_s = time.monotonic()
        _run_prompts(runner, [num_tokens], whole_gpu=True)
        times_s.append(time.monotonic() - begin_s)
    return min(times_s)


def _run(begin: Callable[[], None], task: Task) -> None:
    begin()
    with torch.inference_mode():
        task()


def _logits_of(engine: Engine, ops: Ops, num_rows: int) -> None:
    engine.model.logits(engine.model.zeros(num_rows), ops)


def _logits(engine: Engine, num_rows: int) -> torch.Tensor:
    return torch.zeros((num_rows, engine.vocab_size), device=engine.device)


def _padding(engine: Engine, num_tokens: int, num_seqs: int) -> ForwardBatch:
    device = engine.device
    groups = engine.pool.layout.groups

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return ForwardBatch(
        token_ids=zeros(num_tokens),
        positions=zeros(num_tokens),
        slots=tuple(torch.full((num_tokens,), -1, device=device) for _ in groups),
        block_tables=tuple(zeros(num_seqs, group.num_places(engine.max_len)) for group in groups),
        seq_lens=zeros(num_seqs),
        cu_seqlens=zeros(num_seqs + 1),
        last_tokens=zeros(num_seqs, dtype=torch.int64),
        max_query_len=num_tokens // num_seqs,
        max_seq_len=engine.max_len,
        num_keys=num_tokens if num_tokens > num_seqs else 0,
    )


def _prompt_batches(engine: Engine) -> list[ForwardBatch]:
    """Return a batch of each kind distinguished by attention, the largest first.

    Latents of more keys than are gathered are attended as those of a step without a known number of keys.
    """
    batches = [_padding(engine, num_tokens, num_seqs) for num_tokens, num_seqs in reversed(PROMPT_STEPS)]
    return [*batches, *(replace(batch, num_keys=0) for batch in batches if engine.model.config.latents)]


def _decode_batches(engine: Engine, row_counts: Sequence[int], *, share_prefixes: bool) -> list[ForwardBatch]:
    """Return a batch of each kind distinguished by attention."""
    batches = [_padding(engine, rows, rows) for rows in row_counts]
    sharing = [_with_prefixes(batch) for batch in batches if 1 < len(batch.seq_lens) <= MAX_SHARING_ROWS]
    return [*batches, *sharing] if share_prefixes else batches


def _with_prefixes(batch: ForwardBatch) -> ForwardBatch:
    """Return the batch in the form of a step that reads shared prefixes once, with none shared."""
    none = torch.full_like(batch.seq_lens, -1)
    return replace(batch, prefixes=SharedPrefixes(numbers=none, num_tokens=none))


def _sampled_rows(engine: Engine) -> list[int]:
    return [rows for rows in SAMPLED_ROWS if rows <= engine.sampler.max_rows]


def _sample(engine: Engine, num_rows: int) -> None:
    params, positions = sampling_tensors([PADDING] * num_rows, engine.device), _padding(engine, num_rows, 1).token_ids
    engine.sampler.sample(_logits(engine, num_rows), params, positions)


def _sample_and_advance(engine: Engine, ring: TokenRing) -> None:
    num_rows = ring.turns.shape[0]
    params = sampling_tensors([PADDING] * num_rows, engine.device)
    engine.sampler.sample_and_advance(_logits(engine, num_rows), params, _padding(engine, num_rows, num_rows), ring)


def _adjust(engine: Engine, most_rows: int = 0) -> None:
    """Run the adjustment of logits, with grammars if `most_rows` is positive."""
    grammars = make_grammar_masks(1, most_rows, engine.vocab_size, engine.device) if most_rows else None
    adjustments = Adjustments(1, engine.vocab_size, engine.device)
    none, ones = torch.full((1,), -1, dtype=torch.int32, device=engine.device), _padding(engine, 1, 1).token_ids
    params = sampling_tensors([PADDING], engine.device)
    engine.sampler.adjust(_logits(engine, 1), params, AdjustedRows(none, ones, ones), adjustments.tensors, grammars)


def _run_prompts(runner: PromptRunner, lengths: list[int], whole_gpu: bool) -> None:
    """Run prompts in a single block of each group, because results are void and other blocks may be needed."""
    groups, allocator = runner.engine.pool.layout.groups, runner.engine.allocator
    filtered = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01)
    blocks = allocator.allocate(tuple(1 for _ in groups))
    tables = [
        [block * group.num_places(length) for group, block in zip(groups, blocks, strict=True)] for length in lengths
    ]
    chunks = [
        PromptChunk([0] * length, 0, of_prompt, filtered, is_last=True)
        for length, of_prompt in zip(lengths, tables, strict=True)
    ]
    runner.run(chunks, whole_gpu=whole_gpu)
    allocator.free(chain.from_iterable(blocks))
