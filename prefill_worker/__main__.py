"""`python -m prefill_worker`: a prefill worker process."""

import sys
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from common.base.trace_file import Process
from common.device.engine.engine import Engine, build_engine, resolve_device
from common.device.engine.gpu_share import make_share
from common.device.engine.pool_budget import sized
from common.device.steps.prompt_runner import PromptRunner
from common.device.steps.step_trace import make_trace
from common.device.steps.warm_up import compile_prompt_kernels, unpack_kernels, warm_up_prompts
from common.grammar.followers import make_followers
from common.serving.turns.shared import prompt_plans
from common.serving.worker.start import Incarnation, make_ready, worker_main
from common.settings.config import Config
from common.wire.messages.worker import Role
from prefill_worker.worker import PrefillWorker

DESCRIPTION = """Computes prompts and hands their KV blocks to decode workers.

Dials the router at --net-router-endpoint, registers, and is told which decode workers exist; start as
many as the load asks for, on any GPU. SIGTERM finishes what it owns, a second one stops at once."""


def build(config: Config, incarnation: Incarnation) -> PrefillWorker:
    """Build a worker: load the model, warm up the kernels, and describe the worker for the router."""
    config = sized(config, resolve_device(config.worker.device))
    section = config.prefill
    engine = build_engine(
        config,
        incarnation.memory,
        step_tokens=section.max_batch_tokens,
        logit_rows=section.max_num_seqs,
        meanwhile=partial(_compile, config.kernels.compiled),
        start=incarnation.start,
    )
    max_seqs = section.max_num_seqs if config.worker.batching else 1
    # Without chunking a step must fit the longest prompt.
    step_tokens = section.max_batch_tokens if section.chunking else max(section.max_batch_tokens, engine.max_len)
    runner = PromptRunner(engine, step_tokens, max_seqs, make_share(section.sm_share, engine.device))
    if engine.device.type == "cuda":
        warm_up_prompts(runner)
        incarnation.start.ended("first steps")
        if config.worker.cuda_graphs and engine.graph_safe and config.kernels.prefill_attention == "triton":
            runner.capture_first()
            incarnation.start.ended("graphs")
    process = Process("prefill", incarnation.worker_id, incarnation.epoch)
    runner.trace = make_trace(config.trace, process, engine.device)
    ready = replace(
        make_ready(config, engine, incarnation, Role.PREFILL),
        max_batch_tokens=section.max_batch_tokens,
        max_num_seqs=section.max_num_seqs,
        takes_replies=config.kv.prefix_cache and config.kv.take_replies,
    )
    followers = make_followers(Path(config.model.path), engine.vocab_size)
    followers.begin()
    plans = prompt_plans(config.slo, engine, incarnation.memory.path, incarnation.epoch)
    return PrefillWorker(
        config, engine, runner=runner, ready=ready, drain=incarnation.drain, followers=followers, plans=plans
    )


def _compile(file: str, engine: Engine) -> None:
    if engine.device.type == "cuda":
        compile_prompt_kernels(engine, has_file=unpack_kernels(file, engine.device))


if __name__ == "__main__":
    sys.exit(worker_main(Role.PREFILL, DESCRIPTION, build))
