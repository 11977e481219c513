"""`python -m common.device.ahead`: compile a model's kernels for GPUs that are not there, into a file."""

import logging
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from triton import knobs

from common.base.errors import BatonError, ConfigError
from common.base.log import setup_logging
from common.device.ahead.absent_engine import GPU, absent_engine
from common.device.ahead.absent_gpu import META, AbsentDriver, Card, cards_of, compile_instead_of_launching, pretend
from common.device.ahead.extensions import asked_for, build_extensions
from common.device.engine.pool_budget import sized
from common.device.engine.step_rules import batch_buckets
from common.device.steps.kernel_file import conditions, counted, write_kernels
from common.device.steps.row_state import RowLayout
from common.device.steps.warm_up import decode_tasks, prompt_tasks, run_all
from common.kernels.base.row_operands import RowUpdates
from common.kernels.elementwise.update_rows import RowUpdater
from common.models.base import Task
from common.settings.argument_parser import ArgumentParser
from common.settings.config import WORKER_SECTIONS, Config
from common.settings.options import add_flags, from_flags

logger = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Run the process; return its exit status: 0, or 2 for a wrong setting or model."""
    parser = ArgumentParser(prog="python -m common.device.ahead", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--capability", required=True, metavar="X.Y,...")
    add_flags(parser, Config, WORKER_SECTIONS)
    try:
        args = parser.parse_args(argv)
        config = from_flags(Config, args)
        setup_logging("warm", config.log.level, config.log.format)
        compile_ahead(config, args.capability.split(","), args.out)
    except (BatonError, OSError) as error:
        sys.stderr.write(f"baton warm: {error}\n")
        return 2
    return 0


def compile_ahead(config: Config, capabilities: list[str], out: Path) -> None:
    """Compile what both workers warm up with, for every known card of `capabilities`, and write the file `out`.

    Changes torch and Triton in this process for good. Raises ConfigError for an unknown capability.
    """
    cards = [card for each in capabilities for card in known(each)]
    kernels: list[Any] = []
    compile_instead_of_launching(kernels.append)
    targets = {name: AbsentDriver(known(name)[0].gpu).get_current_target() for name in capabilities}
    with TemporaryDirectory(prefix="baton-warm-") as directory, torch.inference_mode():
        knobs.cache.dir, knobs.compilation.store_binary_only = directory, True
        for card in cards:
            begin_s = time.monotonic()
            pretend(card)
            with counted() as found:
                run_all(tasks_of(config))
            logger.info(
                "%s: %d kernels compiled in %.0f s", card.gpu.name, len(found.compiled), time.monotonic() - begin_s
            )
        build_launchers(kernels)
        written = write_kernels(out, Path(directory), conditions(targets))
    told = "%d kernels and %d extensions in C to launch them, %.1f MB, in %s"
    logger.info(told, len(written.kernels), len(written.extensions), out.stat().st_size / 1e6, out)


def build_launchers(kernels: list[Any]) -> None:
    """Build what loads and launches `kernels`; without a C compiler warn, and leave that to workers."""
    begin_s, extensions = time.monotonic(), asked_for(kernels)
    try:
        build_extensions(extensions)
    except ConfigError as error:
        logger.warning("workers build %d extensions in C themselves, because here %s", len(extensions), error)
    else:
        logger.info("%d extensions in C built in %.0f s", len(extensions), time.monotonic() - begin_s)


def known(capability: str) -> list[Card]:
    """Return the known cards of a capability; raises ConfigError without any."""
    if not (cards := cards_of(capability)):
        raise ConfigError(f"--capability {capability}: no card of it is known; kernels are compiled at the first start")
    return cards


def tasks_of(config: Config) -> list[Task]:
    """Return what both workers warm up with on the GPU of `pretend`."""
    config = sized(config, GPU)
    decode, prefill = config.decode, config.prefill
    rows = decode.max_num_seqs if config.worker.batching else 1
    of_decode = absent_engine(config, step_tokens=decode.local_chunk_tokens, logit_rows=rows)
    of_prefill = absent_engine(config, step_tokens=prefill.max_batch_tokens, logit_rows=prefill.max_num_seqs)
    return [
        *decode_tasks(of_decode, batch_buckets(rows), share_prefixes=decode.share_prefixes),
        *prompt_tasks(of_prefill),
        *prompt_tasks(of_decode),
        lambda: update_rows(rows),
    ]


def update_rows(max_rows: int) -> None:
    """Write changes into the rows of a decode batch, as before the first step."""
    state = RowLayout(max_rows, max_rows).make_state(META)
    RowUpdater(state)(RowUpdates(torch.empty(100, dtype=torch.int32, device=META), 4, 9))


if __name__ == "__main__":
    status = main(sys.argv[1:])
    logging.shutdown()
    sys.exit(status)
