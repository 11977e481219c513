"""Cost of a prompt given as token ids before any computation, stage by stage: in the router, then in a worker.

    python -m benchmarks.prompt_ids /tmp/Qwen3-4B

Each time is the least of many repetitions, because other programs cause any excess. A worker makes `keys` of blocks,
and so does the router with several pools. Three rows show costlier alternatives. A body is read as any JSON, here or in
another process. Keys are made for a text never seen before.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common.base.process import tame_allocator
from common.serving.prompts.token_ids import unknown_token
from common.settings.config import Config, ModelSection
from common.wire.messages.frames import decode, encode
from common.wire.messages.worker import PrefillRequest
from common.wire.values.block_key import TextDigests, pack_keys
from common.wire.values.packing import pack_ids
from deploy.bench.origin import hardware
from deploy.bench.results import append_rows, row_of
from deploy.bench.stats import Figure
from prefill_worker.sequence import PrefillSequence
from router.reading.json_body import values_of
from router.reading.reader import Reader
from router.requests.completion_api import CompletionRequest, parse
from router.text.prompts import TokenIds
from router.text.tokenizer import load_tokenizer
from tests.support.messages import prefill_request

REPETITIONS = 100
BLOCK_SIZE = 16
ROOT = bytes(32)
Stage = Callable[[], object]


async def stages(reader: Reader, reading: Stage, body: bytes, max_model_len: int) -> dict[str, float]:
    """Return seconds by stage, for a body."""

    async def read() -> CompletionRequest:
        return await reader.read([body], max_model_len)

    async def read_elsewhere() -> CompletionRequest:
        return await reader._process.read([body], max_model_len)

    (ids,) = (await read()).prompts
    assert not isinstance(ids, str)
    frame, packed, known = encode(_message(ids)), pack_ids(ids), TextDigests(BLOCK_SIZE)
    known.of(ROOT, packed)
    return {
        "read": await _least_awaited(read),
        "read_as_json": _least(reading),
        "read_elsewhere": await _least_awaited(read_elsewhere),
        "send": _least(lambda: encode(_message(ids))),
        "receive": _least(lambda: _received(frame)),
        "keys": _least(lambda: pack_keys(known.of(ROOT, packed))),
        "keys_of_new_text": _least(lambda: pack_keys(TextDigests(BLOCK_SIZE).of(ROOT, packed))),
    }


def _message(ids: TokenIds) -> PrefillRequest:
    return prefill_request("request", ids)


def _received(frame: bytes) -> str:
    message = decode(frame)
    assert isinstance(message, PrefillRequest)
    return unknown_token(PrefillSequence.of(message).token_ids, 1 << 20)


def _least(stage: Stage) -> float:
    least_s = float("inf")
    for _ in range(REPETITIONS):
        begin_s = time.perf_counter()
        stage()
        least_s = min(least_s, time.perf_counter() - begin_s)
    return least_s


async def _least_awaited(stage: Callable[[], Awaitable[object]]) -> float:
    least_s = float("inf")
    for _ in range(REPETITIONS):
        begin_s = time.perf_counter()
        await stage()
        least_s = min(least_s, time.perf_counter() - begin_s)
    return least_s


async def measured(model: str, counts: list[int]) -> dict[int, list[Figure]]:
    """Return figures by number of ids."""
    section = ModelSection(path=model)
    tokenizer = load_tokenizer(section, 0)
    reader, info, rng = Reader(Config(model=section), tokenizer), tokenizer.info, random.Random(0)
    found = {}
    try:
        for count in counts:
            ids = [rng.randrange(info.vocab_size) for _ in range(count)]
            body = json.dumps({"model": info.name, "prompt": ids, "max_tokens": 16, "stream": True}).encode()

            def as_json(body: bytes = body) -> CompletionRequest:
                return parse(values_of(body), info.name, info.vocab_size, info.eos_token_ids)

            by_stage = await stages(reader, as_json, body, max(counts) + 17)
            found[count] = [Figure(f"{name}_min", seconds * 1e6, "us") for name, seconds in by_stage.items()]
    finally:
        await reader.close()
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prompt_ids", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("model", help="directory with tokenizer.json and config.json; weights are not read")
    parser.add_argument("--counts", default="1000,8000,16000", help="ids of a prompt (default: 1000,8000,16000)")
    parser.add_argument("--results", type=Path, help="file to append a row a run to")
    args = parser.parse_args(argv)
    tame_allocator()
    found = asyncio.run(measured(args.model, list(map(int, args.counts.split(",")))))
    table = Table(title="µs, the least of many")
    for name in ("stage", *(f"{count:,} ids" for count in found)):
        table.add_column(name, justify="left" if name == "stage" else "right")
    for same in zip(*found.values(), strict=True):
        table.add_row(same[0].name.removesuffix("_min"), *(f"{figure.value:,.0f}" for figure in same))
    Console(width=170 if not sys.stdout.isatty() else None).print(table)
    if args.results:
        model = Path(args.model).resolve().name
        rows = [row_of(hardware(), model, f"a prompt of {count} ids", each) for count in found for each in found[count]]
        append_rows(args.results, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
