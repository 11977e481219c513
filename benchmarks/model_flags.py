"""Flags of the schemes in which a benchmark quantizes a model at load, and the model's name in results."""

import argparse
from pathlib import Path

from common.models.reading import AS_STORED, KEEP
from common.settings.config import HEADS, QUANTIZATIONS


def add_quantization(parser: argparse.ArgumentParser) -> None:
    """Add the choices of `model.quantization` and `model.head`."""
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        default=AS_STORED,
        help="as --model-quantization (default: %(default)s)",
    )
    parser.add_argument("--head", choices=HEADS, default=KEEP, help="as --model-head (default: %(default)s)")


def served_as(args: argparse.Namespace) -> str:
    """Return a model's name in results: that of its directory, and schemes in which it is quantized at load."""
    name = Path(args.model_dir).name
    name = name if args.quantization == AS_STORED else f"{name} in {args.quantization}"
    return name if args.head == KEEP else f"{name}, head in {args.head}"
