"""Writes a Hugging Face checkpoint of a known model's shapes with random weights, for benchmarks.

    python -m benchmarks.make_checkpoint qwen3-4b OUT_DIR --tokenizer DIR

Speed depends on the shapes of weights, and not on values, if weights are not zero. GEMMs on zeros draw less power and
run faster. Matrices are normal with deviation 0.02, norms are 1.
"""

import argparse
import json
import shutil
import time
from collections.abc import Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.presets import PRESETS
from common.models.reading import decoder_config
from common.models.settings import Settings
from common.models.sizes.stacks import Stack

MAX_SHARD_BYTES = 5_000_000_000
SHARDS_AT_ONCE = 4  # each shard is in memory until written
BF16_BYTES = 2
SLOW_DECAY = -4.0
"""Logarithm of a state's decay: 2 % a token, so that contexts differ as those of trained models do."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json")

Shapes = dict[str, tuple[int, ...]]


def weight_shapes(config: dict[str, Any]) -> Shapes:
    """Return name and shape of every tensor of the checkpoint, in file order."""
    return {piece.checkpoint_name: piece.shape for stack in _stacks(config) for piece in stack.pieces}


def packed_names(config: dict[str, Any]) -> set[str]:
    """Return the names of tensors that hold bytes: values of less than 16 bits, and their scales."""
    packed = (stack for stack in _stacks(config) if stack.dtype == "uint8")
    return {piece.checkpoint_name for stack in packed for piece in stack.pieces}


def _stacks(config: dict[str, Any]) -> Iterable[Stack]:
    return decoder_config(Settings(config, "config.json")).stacks().values()


def split_shards(shapes: Shapes, max_bytes: int = MAX_SHARD_BYTES) -> Iterator[Shapes]:
    """Yield shards of consecutive tensors of at most `max_bytes`; a larger tensor gets a shard alone."""
    shard: Shapes = {}
    shard_bytes = 0
    for name, shape in shapes.items():
        size_bytes = torch.Size(shape).numel() * BF16_BYTES
        if shard and shard_bytes + size_bytes > max_bytes:
            yield shard
            shard, shard_bytes = {}, 0
        shard[name] = shape
        shard_bytes += size_bytes
    yield shard


def write_weights(
    shapes: Shapes,
    out_dir: Path,
    seed: int,
    max_bytes: int = MAX_SHARD_BYTES,
    packed: Container[str] = (),
) -> int:
    """Write all shards, and an index for several shards; return the bytes of all tensors.

    Args:
        packed: names of tensors that hold bytes.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shards = list(split_shards(shapes, max_bytes))
    weight_map: dict[str, str] = {}

    def write(number: int, shard: Shapes) -> int:
        generator = torch.Generator(device).manual_seed(seed + number)
        tensors = {
            key: _random_bytes(key, shape, generator) if key in packed else _random_weight(key, shape, generator)
            for key, shape in shard.items()
        }
        save_file(tensors, out_dir / names[number], metadata={"format": "pt"})
        return sum(tensor.nbytes for tensor in tensors.values())

    count = len(shards)
    names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    names = names if count > 1 else ["model.safetensors"]
    with ThreadPoolExecutor(SHARDS_AT_ONCE) as pool:
        total_bytes = sum(pool.map(write, range(count), shards))
    for name, shard in zip(names, shards, strict=True):
        weight_map |= dict.fromkeys(shard, name)
    if count > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (out_dir / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return total_bytes


def _random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Make a bfloat16 tensor on the CPU, drawn on the generator's device."""
    if name.endswith(".A_log"):
        return torch.full(shape, SLOW_DECAY, dtype=torch.bfloat16)
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    weight = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    return weight.normal_(0.0, 0.02, generator=generator).cpu()


def _random_bytes(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Make a uint8 tensor on the CPU: any values of MXFP4, with a scale of 2 ** -7."""
    if name.endswith("_scales"):
        return torch.full(shape, 120, dtype=torch.uint8)
    values = torch.empty(shape, dtype=torch.uint8, device=generator.device)
    return values.random_(0, 256, generator=generator).cpu()


def copy_tokenizer(source: Path, out_dir: Path) -> None:
    """Copy the tokenizer files found in `source`; raises SystemExit without a tokenizer.json."""
    if not (source / "tokenizer.json").is_file():
        raise SystemExit(f"{source} has no tokenizer.json")
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, out_dir / name)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.make_checkpoint", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("preset", choices=sorted(PRESETS))
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIR", help="where tokenizer.json is")
    parser.add_argument("--num-layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    config = dict(PRESETS[args.preset])
    if args.num_layers:
        config["num_hidden_layers"] = args.num_layers
        if config.get("layer_types"):
            config["layer_types"] = config["layer_types"][: args.num_layers]
    args.out_dir.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(args.tokenizer, args.out_dir)
    (args.out_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    eos = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    (args.out_dir / "generation_config.json").write_text(json.dumps(eos, indent=2) + "\n")
    started_s = time.monotonic()
    total_bytes = write_weights(weight_shapes(config), args.out_dir, args.seed, packed=packed_names(config))
    print(f"{args.out_dir}: {total_bytes / 1e9:.2f} GB in {time.monotonic() - started_s:.1f} s")


if __name__ == "__main__":
    main()
