"""`python -m decode_worker`: one decode worker process."""

import sys
from pathlib import Path

import zmq
from msgspec.structs import replace

from common.base.trace_file import Process
from common.device.engine.engine import Engine, build_engine, resolve_device
from common.device.engine.pool_budget import sized
from common.device.engine.step_rules import batch_buckets
from common.device.steps.prompt_runner import PromptRunner
from common.device.steps.step_trace import make_trace
from common.device.steps.warm_up import (
    compile_decode_kernels,
    compile_prompt_kernels,
    time_prompt,
    unpack_kernels,
    warm_up_prompts,
)
from common.grammar.followers import make_followers
from common.serving.turns.shared import decode_gate
from common.serving.worker.start import Incarnation, make_ready, worker_main
from common.settings.config import Config
from common.wire.messages.worker import Role
from common.wire.transport.endpoints import told
from common.wire.transport.sockets import Hub, handoff_endpoint
from decode_worker.batch.batch import DecodeBatch
from decode_worker.batch.runner import DecodeRunner
from decode_worker.worker import DecodeWorker, Runners

DESCRIPTION = """Takes prompts over from prefill workers and decodes all its sequences together: in a pool of KV blocks
that both share, or by pulling the blocks.

Dials the router at --net-router-endpoint and registers; prefill workers dial it at
--net-handoff-endpoint. Start as many as the load asks for, on any GPU. SIGTERM finishes what it owns, a
second one stops at once."""


def build(config: Config, incarnation: Incarnation) -> DecodeWorker:
    """Load the model, capture the decode steps and bind the handoff endpoint."""
    config = sized(config, resolve_device(config.worker.device))
    section = config.decode
    max_rows = section.max_num_seqs if config.worker.batching else 1
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    hub = Hub(context, config.net, handoff_endpoint(config.net, f"handoff-{incarnation.epoch:x}"))
    short_tokens = min(section.short_prompt_tokens, section.local_chunk_tokens)
    has_prompts = config.kv.transport == "none" or short_tokens > 0  # otherwise only in emergencies

    def compile_meanwhile(engine: Engine) -> None:
        if engine.device.type == "cuda":
            has_file, row_counts = unpack_kernels(config.kernels.compiled, engine.device), batch_buckets(max_rows)
            compile_decode_kernels(engine, row_counts, share_prefixes=section.share_prefixes, has_file=has_file)
            if has_prompts:
                compile_prompt_kernels(engine, has_file=has_file)

    engine = build_engine(
        config,
        incarnation.memory,
        step_tokens=section.local_chunk_tokens,
        logit_rows=max_rows,
        meanwhile=compile_meanwhile,
        start=incarnation.start,
    )
    prompt_runner = _prompt_runner(config, engine, short_tokens, has_prompts=has_prompts)
    incarnation.start.ended("prompt steps")
    batch = DecodeBatch(max_rows, engine.max_len, engine.pool.shape, engine.vocab_size, engine.device)
    runner = DecodeRunner(
        engine,
        batch,
        max_rows,
        use_graphs=config.worker.cuda_graphs,
        share_prefixes=section.share_prefixes,
    )
    runner.prepare()
    incarnation.start.ended("decode steps")
    process = Process("decode", incarnation.worker_id, incarnation.epoch)
    runner.trace = prompt_runner.trace = make_trace(config.trace, process, engine.device)
    ready = replace(
        make_ready(config, engine, incarnation, Role.DECODE),
        max_num_seqs=max_rows,
        handoff_endpoint=told(hub.endpoint, config.net.advertise),
        short_prompt_tokens=short_tokens,
    )
    followers = make_followers(Path(config.model.path), engine.vocab_size)
    followers.begin()
    worker = DecodeWorker(
        config,
        Runners(runner, prompt_runner),
        hub=hub,
        ready=ready,
        drain=incarnation.drain,
        followers=followers,
        gate=decode_gate(engine, incarnation.memory.path),
    )
    if short_tokens:
        worker.local_prompts.add_time(short_tokens, time_prompt(prompt_runner, short_tokens))
    return worker


def _prompt_runner(config: Config, engine: Engine, short_tokens: int, *, has_prompts: bool) -> PromptRunner:
    """Return the runner for prompts computed here.

    Kernels are warmed up if the worker expects such prompts; steps for short prompts are captured.
    """
    runner = PromptRunner(engine, config.decode.local_chunk_tokens, max_seqs=1)
    if engine.device.type == "cuda" and has_prompts:
        warm_up_prompts(runner)
    has_graphs = config.worker.cuda_graphs and engine.graph_safe and config.kernels.prefill_attention == "triton"
    if engine.device.type == "cuda" and short_tokens and has_graphs:
        runner.capture(short_tokens)
    return runner


if __name__ == "__main__":
    sys.exit(worker_main(Role.DECODE, DESCRIPTION, build))
