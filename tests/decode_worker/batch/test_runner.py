"""Captured decode steps compute the same bits whether kernels overlap (programmatic dependent launch) or not.

A kernel that reads before its predecessor has written goes wrong rarely, by a little, and at full
size only: hence layers of Qwen3-4B's shapes, many steps, and no tolerance.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import pytest
import torch
from torch import Tensor

from common.device.engine.engine import Engine
from common.device.steps.output_ring import PendingOutput
from common.kernels.base.sampling_operands import AdjustmentTensors, GrammarMasks, SamplingTensors, TokenRing
from common.kv.pool import KVPool
from common.kv.transport import make_transport
from common.memory.client.shared_pool import SharedPool
from common.models.decoder import Decoder
from common.ops.base import ForwardBatch, GroupCache
from common.ops.cuda_ops import CudaOps
from common.ops.sampler import AdjustedRows, Sampler
from common.settings.config import KernelsSection
from common.wire.values.kv_layout import KVLayout
from common.wire.values.output_token import OutputToken
from common.wire.values.pool_shape import PoolShape
from common.wire.values.sampling_params import SamplingParams
from decode_worker.batch.batch import DecodeBatch
from decode_worker.batch.runner import DecodeRunner, StepKind
from decode_worker.sequences.rows import Fill
from tests.support.adjusting import adjusted
from tests.support.allocator import BlockAllocator
from tests.support.decoders import qwen3_4b
from tests.support.layouts import one_table, take
from tests.support.sequences import decode_sequence

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

DEVICE, DTYPE, BLOCK_SIZE = torch.device("cuda", 0), torch.bfloat16, 16
STEPS, MAX_LEN = 200, 1536
CONFIG = qwen3_4b(num_layers=4, max_positions=MAX_LEN)
[HEADS] = CONFIG.heads


class WatchedSampler(Sampler):
    """Keeps the logits that it sampled from last, and as they were before it adjusted them."""

    def __init__(self, max_rows: int, *, pdl: bool) -> None:
        super().__init__("triton", max_rows, CONFIG.vocab_size, DEVICE, pdl=pdl)
        self.logits = torch.zeros(max_rows, CONFIG.vocab_size, device=DEVICE)  # [max_rows, vocab] fp32
        self.raw = torch.zeros_like(self.logits)

    def adjust(
        self,
        logits: Tensor,
        params: SamplingTensors,
        rows: AdjustedRows,
        adjustments: AdjustmentTensors,
        grammars: GrammarMasks | None = None,
    ) -> None:
        self.raw[: logits.shape[0]].copy_(logits)
        super().adjust(logits, params, rows, adjustments, grammars)

    def sample_and_advance(self, logits: Tensor, params: SamplingTensors, batch: ForwardBatch, ring: TokenRing) -> None:
        self.logits[: logits.shape[0]].copy_(logits)
        super().sample_and_advance(logits, params, batch, ring)


@dataclass(frozen=True)
class Decoding:
    """Rows of different contexts, ready for their next step."""

    runner: DecodeRunner
    sampler: WatchedSampler

    def logit_bits(self, num_rows: int) -> Tensor:
        """`[num_rows, vocab]` int32."""
        return self.sampler.logits[:num_rows].view(torch.int32)


Start = Callable[[int, int, bool], Decoding]
"""(rows, rows of the captured graph, whether kernels overlap)."""


@pytest.fixture(scope="module")
def model() -> Decoder:
    """Random weights whose layers outweigh the embedding, so that tokens do not repeat themselves."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.manual_seed(0)
    tensors = {}
    for name, stack in CONFIG.stacks().items():
        shape = stack.shape
        drawn = torch.randn(shape, device=DEVICE)
        tensors[name] = (drawn.mul_(0.02) if len(shape) == 2 else drawn.mul_(0.2).add_(1)).to(DTYPE)
    return Decoder(CONFIG, tensors, MAX_LEN)


@pytest.fixture
def start(model: Decoder) -> Iterator[Start]:
    def build(num_rows: int, bucket: int, pdl: bool) -> Decoding:
        layout = KVLayout("", CONFIG.cache_groups(BLOCK_SIZE, CONFIG.dtype))
        transport = make_transport("auto", DEVICE)
        shape = PoolShape(layout, (max(3, num_rows) * layout.groups[0].num_places(MAX_LEN) + 1,))
        pool = KVPool(shape, torch.empty(shape.num_bytes, dtype=torch.uint8, device=DEVICE))
        torch.manual_seed(1)
        pool.caches[0].normal_()
        ops, sampler = step_ops(pool, bucket, pdl), WatchedSampler(bucket, pdl=pdl)
        allocator = BlockAllocator(shape)
        engine = Engine(
            device=DEVICE,
            model=model,
            model_fingerprint="",
            ops=ops,
            step_ops=ops,
            pdl=pdl,
            sampler=sampler,
            pool=pool,
            allocator=allocator,
            shared=cast(SharedPool, None),  # nothing changes hands here
            transport=transport,
            max_len=MAX_LEN,
            graph_safe=True,
        )
        batch = DecodeBatch(bucket, MAX_LEN, shape, CONFIG.vocab_size, DEVICE)
        runner = DecodeRunner(engine, batch, bucket, use_graphs=True, share_prefixes=False)
        runner.buckets = [bucket]
        runner.prepare()
        fill(batch, allocator, num_rows)
        return Decoding(runner, sampler)

    yield build
    torch.cuda.synchronize()


def step_ops(pool: KVPool, max_rows: int, pdl: bool) -> CudaOps:
    return CudaOps([GroupCache(pool.caches[0], HEADS.num_q_heads)], KernelsSection(), max_rows, pdl=pdl)


def fill(batch: DecodeBatch, allocator: BlockAllocator, num_rows: int) -> None:
    for row in range(num_rows):
        context = 40 + 37 * row
        blocks = one_table(take(allocator, -(-(context + STEPS + 1) // BLOCK_SIZE)), BLOCK_SIZE)
        sequence = decode_sequence(f"test {row}", [row + 7] * context, 0, SamplingParams(temperature=0.0), blocks)
        batch.apply([Fill(row, sequence)])


@pytest.mark.parametrize(("num_rows", "bucket"), [(1, 1), (8, 8), (33, 40)])
def test_overlapping_kernels_change_no_bit_of_tokens_or_logits(num_rows: int, bucket: int, start: Start) -> None:
    both = [start(num_rows, bucket, pdl) for pdl in (False, True)]
    assert all(each.runner.graphs for each in both)
    differs = torch.zeros(STEPS, dtype=torch.bool, device=DEVICE)
    texts: list[list[list[list[int]]]] = [[], []]
    in_flight: list[PendingOutput] = []
    for step in range(STEPS):
        launched = [each.runner.launch(num_rows) for each in both]
        differs[step] = (both[0].logit_bits(num_rows) != both[1].logit_bits(num_rows)).any()
        for text, pending in zip(texts, in_flight, strict=False):
            text.append(pending.output().token_ids())
        in_flight = launched
    for text, pending in zip(texts, in_flight, strict=True):
        text.append(pending.output().token_ids())
    assert not differs.any(), f"logits differ in steps {differs.nonzero().flatten().tolist()}"
    assert texts[0] == texts[1]
    assert all(bool(torch.isfinite(each.sampler.logits[:num_rows]).all()) for each in both)
    assert len({str(tokens) for tokens in texts[0]}) > STEPS // 4, "nearly the same token every step proves little"


@pytest.mark.parametrize("has_logprobs", [False, True])
def test_logits_are_adjusted_in_every_graph_and_every_token_counts(has_logprobs: bool, start: Start) -> None:
    """Row 1 of three is left as it is; the fourth is padding. Log-probabilities are of the logits before."""
    decoding, prompt = start(0, 4, True), [5, 6, 7, 7]
    runner, sampler = decoding.runner, decoding.sampler
    num_logprobs = (6, 0, 1) if has_logprobs else (0, 0, 0)
    params = [
        SamplingParams(temperature=0.0, frequency_penalty=0.5, repetition_penalty=1.3, num_logprobs=num_logprobs[0]),
        SamplingParams(temperature=0.0),
        SamplingParams(
            temperature=0.0, presence_penalty=2.0, biased_token_ids=(9, 10), biases=(30.0, 29.5),
            num_logprobs=num_logprobs[2],
        ),
    ]  # fmt: skip
    outputs = [[8], [8], [8]]
    for row, each in enumerate(params):
        sequence = decode_sequence(f"test {row}", [*prompt, 8], 1, each, one_table(take(runner.engine.allocator, 8)))
        runner.batch.apply([Fill(row, sequence, state_slot=(2, -1, 0)[row])])
    assert list(runner.graphs) == [StepKind(4)]
    for step in range(40):
        rows = runner.launch(3, has_logprobs=has_logprobs).output().rows
        assert list(runner.graphs) == list(dict.fromkeys([StepKind(4), StepKind(4, has_logprobs)]))
        for row, each in enumerate(params):
            [token] = rows[row]
            wanted = adjusted(sampler.raw[row].cpu(), each, prompt, outputs[row])
            torch.testing.assert_close(sampler.logits[row].cpu(), wanted, msg=f"step {step}, row {row}")
            assert token.token_id == int(sampler.logits[row].argmax())
            check_logprobs(token, sampler.raw[row], num_logprobs[row])
            outputs[row].append(token.token_id)
    assert len({*outputs[0]}) > 5 and {9, 10} <= {*outputs[2]}, "what is penalized gives way to others"


def check_logprobs(token: OutputToken, logits: Tensor, num_wanted: int) -> None:
    if not num_wanted:
        assert token.logprobs is None
        return
    assert token.logprobs is not None and token.logprobs.token_ids[0] == token.token_id
    law = logits.double().log_softmax(dim=-1)
    assert token.logprobs.values == pytest.approx(law[list(token.logprobs.token_ids)].tolist(), abs=1e-4)
    likeliest = law.topk(num_wanted - 1).values.tolist()
    assert token.logprobs.values[1:] == pytest.approx(likeliest, abs=1e-4)
    assert len({*token.logprobs.token_ids[1:]}) == num_wanted - 1
