"""Compare the choices of a model in each scheme with those of the unquantized model.

    python -m benchmarks.quantization [MODEL_DIR] [--texts 32] [--tokens 128] [--device cpu]

The unquantized model draws texts at temperature 1. Then each scheme computes the same texts. The table has the mean
divergence (KL, in nats) of the distributions of the next token, and how often both find the same token likeliest.
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.own_memory import own_memory, require_gpu, separate, take_all, usual
from common.base.dtypes import DTYPES
from common.device.engine.engine import Engine, build_engine
from common.models.loader import model_bytes
from common.models.reading import AS_STORED, PLAIN
from common.ops.base import ForwardBatch
from common.settings.config import QUANTIZATIONS, Config, ModelSection, WorkerSection
from deploy.bench.results import Row, append_rows, row_of
from deploy.bench.stats import Figure


class Agreement(NamedTuple):
    """A scheme beside the model as stored."""

    kl: float  # nats a token
    top_1: float  # share of places with the same likeliest token


class Texts:
    """Sequences in blocks of an engine's pool, each beginning with one token, and the batches that compute them."""

    def __init__(self, engine: Engine, count: int, num_tokens: int) -> None:
        self.engine, self.count = engine, count
        shape = engine.pool.shape
        owned = separate(shape, usual(shape))
        self.tables = []
        for group, block_ids in zip(shape.layout.groups, owned, strict=True):
            width = group.num_places(num_tokens)
            if count * width > len(block_ids):
                raise SystemExit(f"the pool has {len(block_ids)} blocks of a group, {count * width} are needed")
            table = torch.tensor(block_ids[: count * width], dtype=torch.int32, device=engine.device)
            self.tables.append(table.view(count, width))

    def logits(self, token_ids: Tensor, start: int) -> Tensor:
        """Compute `token_ids [count, length]` from position `start` on: fp32 `[count, length, vocab]`."""
        count, length = token_ids.shape
        device = self.engine.device
        positions = torch.arange(start, start + length, device=device).repeat(count)
        rows = torch.arange(count, device=device).repeat_interleave(length)
        slots = []
        for group, table in zip(self.engine.pool.shape.layout.groups, self.tables, strict=True):
            places = positions // group.block_size if group.grows else torch.zeros_like(positions)
            slots.append(table[rows, places].long() * group.block_size + positions % group.block_size)
        batch = ForwardBatch(
            token_ids=token_ids.flatten().int(),
            positions=positions.int(),
            slots=tuple(slots),
            block_tables=tuple(self.tables),
            seq_lens=torch.full((count,), start + length, dtype=torch.int32, device=device),
            cu_seqlens=torch.arange(0, count * length + 1, length, dtype=torch.int32, device=device),
            last_tokens=None,
            max_query_len=length,
            max_seq_len=start + length,
            num_keys=count * (start + length),
        )
        return self.engine.model.forward(batch, self.engine.ops).view(count, length, -1)

    def drawn(self, num_tokens: int) -> Tensor:
        """Return random texts of the model: `[count, num_tokens]`."""
        generator = torch.Generator(self.engine.device).manual_seed(0)
        shape, device = (self.count, 1), self.engine.device
        ids = torch.randint(self.engine.vocab_size, shape, generator=generator, device=device)
        for position in range(num_tokens - 1):
            probs = self.logits(ids[:, -1:], position)[:, 0].softmax(-1)
            ids = torch.cat((ids, torch.multinomial(probs, 1, generator=generator)), dim=1)
        return ids


def agreement(logits: Tensor, expected: Tensor) -> Agreement:
    """Compare logits with those of the model as stored, place by place."""
    ours, theirs = logits.log_softmax(-1), expected.log_softmax(-1)
    kl = (theirs.exp() * (theirs - ours)).sum(-1).mean()
    same = (logits.argmax(-1) == expected.argmax(-1)).float().mean()
    return Agreement(float(kl), float(same))


def compare(args: argparse.Namespace) -> tuple[Table, list[Row]]:
    """Return the table, and the result rows."""
    rows: list[Row] = []
    table = Table("scheme", "weights, MB", "KL, nats a token", "same likeliest token")
    ids, expected = torch.empty(0), torch.empty(0)
    for choice in (PLAIN, *(each for each in QUANTIZATIONS if each not in (AS_STORED, PLAIN))):
        config = Config(
            model=ModelSection(path=args.model_dir, quantization=choice), worker=WorkerSection(device=args.device)
        )
        num_tokens = args.texts * args.tokens
        with own_memory(args.device) as memory, torch.inference_mode():
            engine = build_engine(config, memory, step_tokens=num_tokens, logit_rows=num_tokens)
            take_all(engine.shared)
            texts = Texts(engine, args.texts, args.tokens)
            if choice == PLAIN:
                ids = texts.drawn(args.tokens)
            logits = texts.logits(ids, 0).cpu()
            dtype = engine.pool.shape.layout.groups[0].dtype
            num_mb = model_bytes(engine.model.config, dtype) / 1e6
        if choice == PLAIN:
            expected = logits
            table.add_row(f"{DTYPES[dtype]}".removeprefix("torch."), f"{num_mb:.2f}", "", "")
        else:
            found = agreement(logits, expected)
            table.add_row(choice, f"{num_mb:.2f}", f"{found.kl:.5f}", f"{found.top_1:.2%}")
            workload = f"quantized to {choice} at load, {args.texts} texts of {args.tokens} tokens, {args.device}"
            figures = Figure("scheme_divergence", found.kl, "nats"), Figure("scheme_agreement", found.top_1, "")
            rows += [row_of("none", Path(args.model_dir).name, workload, figure) for figure in figures]
    return table, rows


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quantization",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model_dir", nargs="?", default="deploy/demo_model", help="(default: %(default)s)")
    parser.add_argument("--texts", type=int, default=32, help="texts drawn (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a text (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="(default: %(default)s)")
    parser.add_argument("--results", type=Path, help="file to append a row a run to")
    args = parser.parse_args()
    require_gpu(args.device)
    table, rows = compare(args)
    Console().print(table)
    if args.results:
        append_rows(args.results, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
