"""Distance of the bundled model in each format of quantized checkpoints from the same model in floats.

    python -m benchmarks.formats --results benchmarks/results.csv

The model in floats draws texts. At each of their places, probabilities of the next token are compared with those of the
quantized model. Figures are the Kullback-Leibler divergence, and the share of places with the same most likely token.
Needs no GPU.
"""

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor

from common.models.quantization.groups import MIDDLE, rounded
from common.models.sizes.codes import BLOCK
from common.ops.base import pack
from deploy.bench.results import Row, append_rows, row_of
from deploy.bench.stats import Figure
from tests.support.packed_checkpoints import CASES, Case, pack_checkpoint

DEMO_MODEL = Path(__file__).parents[1] / "deploy" / "demo_model"
AT_LOAD = "int4"
"""Quantization at load, which no checkpoint is in."""
COMPARED = (
    "fp8-blocks", "fp8-modelopt", "fp8-compressed-rows", "mxfp8-compressed", "int8-compressed",
    "int8-compressed-packed", "gptq-int8", "int4-compressed-asymmetric", "awq", "gptq", "gptq-act-order", "marlin",
    "nvfp4-modelopt", "mxfp4-compressed", AT_LOAD,
)  # fmt: skip


KNOWN = (*CASES, AT_LOAD)


def rounded_rows(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return a matrix as `--model-quantization int4` holds it, and what this means."""
    groups = rounded(matrix, matrix.shape[1] // BLOCK)
    return {"codes": pack(groups.codes.flatten(1).add(MIDDLE).byte()), "scales": groups.scales.half()}, groups.elements


class Distance(NamedTuple):
    """Means over all places of all texts."""

    bits: float  # of an element in the file, with its part of scales
    divergence: float  # nats
    agreement: float  # share of places


def model_in(directory: Path) -> Any:
    """Return a checkpoint's model in fp32."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()


def texts_of(model: Any, count: int, length: int) -> Tensor:
    """Return texts that a model draws from nothing: token ids `[count, length]`."""
    torch.manual_seed(0)
    starts = torch.randint(model.config.vocab_size, (count, 1))
    drawn: Tensor = model.generate(starts, max_new_tokens=length - 1, min_new_tokens=length - 1, do_sample=True)
    return drawn


@contextmanager
def packed(case: str) -> Iterator[tuple[Path, Path]]:
    """Provide directories of the bundled model in a format, and of the same made plain."""
    with TemporaryDirectory() as temporary:
        directories = Path(temporary, "packed"), Path(temporary, "plain")
        for directory in directories:
            shutil.copytree(DEMO_MODEL, directory)
        made = Case({}, rounded_rows) if case == AT_LOAD else CASES[case]()
        pack_checkpoint(*directories, made, evenly=True)
        yield directories


def distance(case: str, texts: Tensor, expected: Tensor) -> Distance:
    """Return the distance of a format from the log-probabilities `[texts, length, vocab]` of the model in floats."""
    with packed(case) as (directory, plain):
        found = model_in(plain)(texts).logits.log_softmax(-1)
        bits = bits_of(directory, plain)
    divergence = (expected.exp() * (expected - found)).sum(-1).mean().item()
    return Distance(bits, divergence, (expected.argmax(-1) == found.argmax(-1)).float().mean().item())


def bits_of(directory: Path, plain: Path) -> float:
    """Return the bits of an element of the matrices that a checkpoint has quantized."""
    num_bytes = sum(each.numel() * each.itemsize for each in _matrices(directory))
    return 8.0 * num_bytes / sum(each.numel() for each in _matrices(plain))


def _matrices(directory: Path) -> list[Tensor]:
    tensors = load_file(directory / "model.safetensors")
    return [each for name, each in tensors.items() if "_proj." in name]


@torch.inference_mode()
def main(argv: list[str]) -> int:
    args = parse_args(argv)
    floats = model_in(DEMO_MODEL)
    texts = texts_of(floats, args.texts, args.length)
    expected = floats(texts).logits.log_softmax(-1)
    table = Table("format", "bits", "divergence, nats", "same token", title="the bundled model, beside its floats")
    rows: list[Row] = []
    for case in args.formats:
        found = distance(case, texts, expected)
        table.add_row(case, f"{found.bits:.2f}", f"{found.divergence:.4f}", f"{found.agreement:.1%}")
        workload = f"{case}, {args.texts} texts of {args.length} tokens"
        units = {"bits": "bits", "divergence": "nats", "agreement": ""}
        rows += [
            row_of("none", "demo_model", workload, Figure(f"format_{name}", value, units[name]))
            for name, value in found._asdict().items()
        ]
    Console().print(table)
    if args.results:
        append_rows(args.results, rows)
    return 0


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.formats", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", type=_formats, default=COMPARED, help=f"any of {', '.join(KNOWN)}")
    parser.add_argument("--texts", type=int, default=16, help="texts (default: %(default)d)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a text (default: %(default)d)")
    parser.add_argument("--results", type=Path, help="file to append a row a run to")
    return parser.parse_args(argv)


def _formats(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in KNOWN]:
        raise argparse.ArgumentTypeError(f"{unknown[0]}: known are {', '.join(KNOWN)}")
    return names


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
