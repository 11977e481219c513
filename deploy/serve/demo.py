"""`baton demo`: serve the bundled model quietly, stream a verse through the HTTP API, show the figures, drain."""

import asyncio
import os
import sys
import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from common.base.background_writer import BackgroundWriter
from common.base.json_file import JsonObject
from common.settings.config import Config
from deploy.operate.health import fetch_health, local_url, transports
from deploy.processes.console import Console, Sink, background_writer
from deploy.processes.mps import Mps
from deploy.processes.supervisor import Supervisor
from deploy.serve.command import Fleet, prepared
from deploy.serve.completion_client import CompletionFailed, CompletionTimes, stream_completion

DEMO_MODEL = Path(__file__).parents[1] / "demo_model"
COMPLETION_DEADLINE_S = 120.0
NUM_TAIL_LINES = 40


@dataclass(frozen=True, slots=True)
class Verse:
    """Request of the demo."""

    prompt: str
    max_tokens: int
    seed: int


async def demo(config: Config, fleet: Fleet, verse: Verse) -> int:
    """Run the demo; return exit code 0 after the verse and a clean drain, 1 after a failure.

    After a failure the end of the log is printed, and the log file stays.
    """
    handle, log_name = tempfile.mkstemp(prefix="baton-demo-", suffix=".log")
    with (
        os.fdopen(handle, "wb") as file,
        background_writer(file.fileno()) as log,
        BackgroundWriter(sys.stdout.fileno()) as out,
        BackgroundWriter(sys.stderr.fileno()) as terminal,
    ):
        out.write(f"starting {fleet.num_prefill} prefill + {fleet.num_decode} decode; log: {log_name}\n")
        console = Console(log, terminal if sys.stderr.isatty() else None)
        async with prepared(config, fleet, console) as (supervisor, mps):
            exit_code = await _serve_one(supervisor, mps, config, verse, out)
    if exit_code:
        _print_tail(Path(log_name))
    else:
        Path(log_name).unlink(missing_ok=True)
    return exit_code


async def _serve_one(supervisor: Supervisor, mps: Mps, config: Config, verse: Verse, out: Sink) -> int:
    url = local_url(config.router.host, config.router.port)
    serving = asyncio.create_task(supervisor.run(lambda health: None))
    ready = asyncio.create_task(supervisor.ready.wait())
    error = ""
    try:
        await asyncio.wait([serving, ready], return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            times = await _recite(url, config.model.served_name, verse, out)
            out.write(f"{_figures(times, await _health_now(url, supervisor), mps)}\n")
    except (CompletionFailed, aiohttp.ClientError, TimeoutError) as failure:
        error = f"the completion failed: {type(failure).__name__}: {failure}"
    finally:
        ready.cancel()
        if not serving.done():
            supervisor.stop()
    exit_code = await serving
    error = error or supervisor.failure or ("" if supervisor.ready.is_set() else "stopped before it was ready")
    if error:
        print(f"\nbaton demo: {error}", file=sys.stderr)
    return 1 if error else exit_code


async def _recite(url: str, model: str, verse: Verse, out: Sink) -> CompletionTimes:
    out.write(f"\n{verse.prompt}")
    body = {"model": model, "prompt": verse.prompt, "max_tokens": verse.max_tokens, "seed": verse.seed}
    body |= {"temperature": 0.8, "top_p": 0.95}
    try:
        return await stream_completion(url, body, out.write, COMPLETION_DEADLINE_S)
    finally:
        out.write("\n\n")


async def _health_now(url: str, supervisor: Supervisor) -> JsonObject:
    async with aiohttp.ClientSession() as session:
        health = await fetch_health(session, url) or supervisor.health
    assert health is not None  # the supervisor was ready
    return health


def _figures(times: CompletionTimes, health: JsonObject, mps: Mps) -> str:
    lines = [
        f"TTFT {times.ttft_s * 1e3:.1f} ms   TPOT {times.tpot_s * 1e3:.2f} ms   {times.num_tokens} tokens",
        f"KV path: {transports(health)}",
        *([f"GPU shared with {mps.text}"] if mps.text else []),
        *(
            f"  {role:<8} pid {worker['pid']:<8} {worker['device']}"
            for role, members in health["workers"].items()
            for worker in members
        ),
    ]
    return "\n".join(lines)


def _print_tail(log: Path) -> None:
    print("--- end of the log", file=sys.stderr)
    with log.open(errors="replace") as lines:
        for line in deque(lines, maxlen=NUM_TAIL_LINES):
            print(line, end="", file=sys.stderr)
    print(f"--- all of it: {log}", file=sys.stderr)
