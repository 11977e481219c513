"""`python -m tests.e2e.sharing_decode`: a decode worker on a CPU whose steps share prefixes of any length."""

import logging
import sys

import torch

from common.ops.base import ForwardBatch, GroupCache
from common.ops.torch_ops import TorchOps
from common.serving.worker.start import Incarnation, worker_main
from common.settings.config import Config
from common.wire.messages.worker import Role
from decode_worker import __main__ as program
from decode_worker.batch import runner
from decode_worker.worker import DecodeWorker

logger = logging.getLogger(__name__)


class SharingOps(TorchOps):
    """Rows that are said to share a prefix have to."""

    most_rows = 0

    @property
    def shares_prefixes(self) -> bool:
        return True

    def begin(self, batch: ForwardBatch) -> ForwardBatch:
        if batch.prefixes is not None:
            self._check(batch)
        return super().begin(batch)

    def _check(self, batch: ForwardBatch) -> None:
        assert batch.prefixes is not None and batch.one_token_each
        [tables], block_size = batch.block_tables, self.caches[0].shape[3]
        numbers, num_tokens = batch.prefixes.numbers, batch.prefixes.num_tokens
        for number in set(numbers.tolist()) - {-1}:
            rows = torch.nonzero(numbers == number).flatten()
            [num_shared] = set(num_tokens[rows].tolist())
            assert 0 < num_shared < int(batch.seq_lens[rows].min()) and num_shared % block_size == 0
            shared = tables[rows, : num_shared // block_size]
            assert bool((shared == shared[0]).all()), f"rows {rows.tolist()} do not begin with the same blocks"
            if len(rows) > self.most_rows:
                self.most_rows = len(rows)
                logger.info("%d rows share a prefix", self.most_rows)


def build(config: Config, incarnation: Incarnation) -> DecodeWorker:
    runner.MIN_SPARED_BYTES = 1  # type: ignore[attr-defined]
    worker = program.build(config, incarnation)
    q_heads = worker.engine.model.config.q_heads
    object.__setattr__(
        worker.engine,
        "step_ops",
        SharingOps([GroupCache(*each) for each in zip(worker.engine.pool.caches, q_heads, strict=True)]),
    )
    worker.runner.shares_prefixes = config.decode.share_prefixes and worker.engine.step_ops.shares_prefixes
    worker.steps.sharing._min_places = 1
    return worker


if __name__ == "__main__":
    sys.exit(worker_main(Role.DECODE, program.DESCRIPTION, build))
