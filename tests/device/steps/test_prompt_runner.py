"""Chunks in, tokens out: batches, chunks and padding to a captured bucket change nothing."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from common.device.engine.engine import Engine
from common.device.engine.gpu_share import GpuShare, make_share
from common.device.steps import prompt_scores
from common.device.steps.prompt_buffers import PromptChunk
from common.device.steps.prompt_runner import TOKEN_BUCKETS, Bucket, PendingPrompts, PromptRunner
from common.settings.config import Config, ModelSection, WorkerSection
from common.settings.memory_sections import KVSection
from common.wire.messages.frames import decode, encode
from common.wire.messages.worker import PromptLogprobs
from common.wire.values.output_token import Logprobs, OutputToken
from common.wire.values.packing import unpack_floats, unpack_ids
from common.wire.values.sampling_params import SamplingParams
from tests.support.adjusting import adjusted
from tests.support.engines import lone_engine
from tests.support.layouts import take

Checkpoint = Callable[[str], tuple[Path, Any]]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def engine(checkpoint: Checkpoint, request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param != "cpu" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    directory, _ = checkpoint("qwen3-tied")
    config = Config(
        model=ModelSection(path=str(directory), dtype="float32"),
        worker=WorkerSection(device=request.param),
        kv=KVSection(pool_bytes=4 << 20),
    )
    with lone_engine(config, step_tokens=64, logit_rows=8) as engine:
        engine.pool.caches[0].fill_(float("nan"))
        yield engine


def prompt(length: int, engine: Engine, sampling: SamplingParams = GREEDY) -> PromptChunk:
    ids = torch.randint(2, 290, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    return PromptChunk(ids, 0, [take(engine.allocator, -(-length // 16))], sampling, is_last=True)


def expected(checkpoint: Checkpoint, chunks: list[PromptChunk]) -> list[OutputToken]:
    _, model = checkpoint("qwen3-tied")
    with torch.inference_mode():
        logits = [model(torch.tensor([chunk.token_ids])).logits[0, -1] for chunk in chunks]
        return [OutputToken(int(each.argmax())) for each in logits]


@pytest.mark.medium
def test_a_batch_gives_each_prompt_its_token(engine: Engine, checkpoint: Checkpoint) -> None:
    chunks = [prompt(length, engine) for length in (1, 17, 40)]
    assert PromptRunner(engine, 64, 8).run(chunks) == expected(checkpoint, chunks)


@pytest.mark.medium
def test_what_a_prompt_asks_for_is_done_for_it_and_not_for_others(engine: Engine, checkpoint: Checkpoint) -> None:
    runner, (_, model) = PromptRunner(engine, 64, 8), checkpoint("qwen3-tied")
    if engine.device.type == "cuda":
        runner.capture()
    params = [
        GREEDY,
        SamplingParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=2.0, num_logprobs=4),
        SamplingParams(temperature=0.0, biased_token_ids=(9,), biases=(100.0,)),
        SamplingParams(temperature=0.0, num_logprobs=1),
    ]
    for asked in (params, params[:1] * 2, params[1:2], params[::-1]):
        chunks = [prompt(10 + i, engine, each) for i, each in enumerate(asked)]
        chunks = [replace(chunk, sequence_ids=chunk.token_ids, num_outputs=5) for chunk in chunks]
        for chunk, token in zip(chunks, runner.run(chunks), strict=True):
            with torch.inference_mode():
                logits = model(torch.tensor([chunk.token_ids])).logits[0, -1]
            wanted = adjusted(logits, chunk.sampling, chunk.token_ids[:-5], chunk.token_ids[-5:]).argmax()
            assert token is not None and token.token_id == wanted
            told, law = token.logprobs, logits.log_softmax(dim=-1)
            assert (0 if told is None else len(told.values)) == chunk.sampling.num_logprobs
            if told is not None:
                assert told.token_ids[0] == token.token_id
                assert told.values == pytest.approx(law[list(told.token_ids)].tolist(), abs=1e-3)


def test_a_prompt_in_chunks_gives_a_token_at_its_end_only(engine: Engine, checkpoint: Checkpoint) -> None:
    runner, whole = PromptRunner(engine, 64, 8), prompt(50, engine)
    tokens = []
    for begin, end in ((0, 16), (16, 47), (47, 50)):
        ids = whole.token_ids[begin:end]
        tokens += runner.run([PromptChunk(ids, begin, whole.tables, GREEDY, is_last=end == 50)])
    assert tokens == [None, None, *expected(checkpoint, [whole])]


def test_steps_launched_ahead_do_not_disturb_each_other(engine: Engine, checkpoint: Checkpoint) -> None:
    runner, steps = PromptRunner(engine, 64, 8), [[3, 20], [41], [30, 2, 9], [17], [5, 6, 7, 8]]
    chunks = [[prompt(length, engine) for length in lengths] for lengths in steps]
    if engine.device.type == "cuda":
        runner.capture()
    pending = [runner.launch(step) for step in chunks[:2]]
    for i, step in enumerate(chunks):
        assert pending[i].tokens() == expected(checkpoint, step)
        pending += [runner.launch(ahead) for ahead in chunks[i + 2 : i + 3]]


class FakeShare(GpuShare):
    """Writes down what steps ask for."""

    def __init__(self) -> None:
        self.limited = cast(torch.cuda.Stream, object())
        self.asked: list[bool] = []

    @contextmanager
    def stream(self, *, whole: bool) -> Iterator[None]:
        self.asked.append(whole)
        yield


class FakeGraph:
    """Counts its replays."""

    num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


@pytest.mark.medium
@pytest.mark.parametrize("whole_gpu", [True, False])
@pytest.mark.parametrize(
    ("lengths", "replayed"), [([17], "small"), ([30], "small"), ([31], "large"), ([80], None), ([9, 8], "batch")]
)
def test_a_step_replays_the_smallest_graph_of_its_stream(
    lengths: list[int], replayed: str | None, whole_gpu: bool, engine: Engine
) -> None:
    share = FakeShare()
    runner = PromptRunner(engine, 96, 8, share)
    sampled = torch.zeros(8, dtype=torch.int32, device=engine.device)
    graphs = {(name, whole): FakeGraph() for name in ("small", "large", "batch") for whole in (True, False)}
    for (name, whole), graph in graphs.items():
        num_tokens, num_seqs = {"small": (30, 1), "large": (64, 1), "batch": (64, 8)}[name]
        runner.graphs[Bucket(num_tokens, num_seqs, whole)] = (cast(torch.cuda.CUDAGraph, graph), sampled)
    runner.run([prompt(length, engine) for length in lengths], whole_gpu=whole_gpu)
    expected_replays = [(replayed, whole_gpu)] if replayed else []
    assert [key for key, graph in graphs.items() for _ in range(graph.num_replays)] == expected_replays
    assert share.asked == [whole_gpu]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("has_share", "max_seqs", "kinds"),
    [
        (False, 8, {(1, True), (8, True)}),
        (True, 8, {(1, True), (8, False)}),
        (False, 1, {(1, True)}),
        (True, 1, {(1, True), (1, False)}),
    ],
)
def test_lone_prompts_have_graphs_of_the_whole_gpu(
    has_share: bool, max_seqs: int, kinds: set[tuple[int, bool]], engine: Engine
) -> None:
    buckets = PromptRunner(engine, 96, max_seqs, FakeShare() if has_share else GpuShare())._wanted_buckets()
    assert set(buckets) == {Bucket(num_tokens, *kind) for num_tokens in (16, 32, 64, 96) for kind in kinds}
    assert [bucket.num_tokens for bucket in buckets] == sorted((bucket.num_tokens for bucket in buckets), reverse=True)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Bucket]:
    """Buckets in the order of their captures, which give a graph that does nothing."""
    buckets: list[Bucket] = []

    def note(runner: PromptRunner, bucket: Bucket) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        buckets.append(bucket)
        return cast(torch.cuda.CUDAGraph, FakeGraph()), torch.zeros(8, dtype=torch.int32)

    monkeypatch.setattr(PromptRunner, "_captured", note)
    return buckets


@pytest.mark.medium
@pytest.mark.parametrize("num_seqs", [1, 8])
def test_until_all_graphs_are_there_steps_replay_one_that_is_not_much_larger(
    num_seqs: int, engine: Engine, captured: list[Bucket]
) -> None:
    runner = PromptRunner(engine, 2048, 8)
    runner.capture_first()
    assert captured == [Bucket(size, seqs, True) for size in (2048, 1024, 512, 256) for seqs in (1, 8)]
    sizes = range(num_seqs, 2049)

    def replayed(num_tokens: int) -> int | None:
        bucket = runner._bucket(num_tokens, num_seqs, num_tokens, whole_gpu=True)
        assert bucket is None or (bucket in captured and bucket.num_seqs == num_seqs)
        return bucket and bucket.num_tokens

    first = {size: replayed(size) for size in sizes}
    assert all(first[size] == 256 for size in sizes if size <= 256)
    assert all(first[size] == (512 if size <= 512 else 1024) for size in sizes if 256 < size <= 1024)
    assert all(first[size] is None for size in sizes if 1024 < size <= 1792), "padding takes longer than launching"
    assert all(first[size] == 2048 for size in sizes if size > 1792)
    while runner.missing:
        runner.capture_ahead()
    assert sorted(captured) == sorted(runner._wanted_buckets()) == sorted(runner.graphs)
    runner.capture_ahead()
    assert len(captured) == len(runner.graphs), "none is captured twice"
    assert {size: replayed(size) for size in sizes} == {
        size: next(tokens for tokens in sorted(TOKEN_BUCKETS) if tokens >= size) for size in sizes
    }


@pytest.mark.medium
def test_what_most_steps_lacked_is_captured_first_and_then_the_largest(engine: Engine, captured: list[Bucket]) -> None:
    runner = PromptRunner(engine, 2048, 8)
    runner.capture_first()
    captured.clear()
    for num_tokens, num_seqs in ((300, 1), (40, 8), (300, 1), (512, 1), (1500, 8), (1500, 8), (1500, 8)):
        runner._bucket(num_tokens, num_seqs, num_tokens, whole_gpu=True)
    assert runner.lacked_graphs
    for _ in range(3):
        runner.capture_ahead()
    assert not runner.lacked_graphs
    for _ in range(2):
        runner.capture_ahead()
    assert [bucket[:2] for bucket in captured] == [(1536, 8), (320, 1), (64, 8), (1792, 8), (1792, 1)]


@pytest.mark.medium
def test_a_step_of_many_keys_replays_no_graph_that_is_much_larger(engine: Engine, captured: list[Bucket]) -> None:
    runner = PromptRunner(engine, 2048, 8)
    runner.capture_first()
    steps = (500, 900), (520, 900), (520, 1025), (520, 2000)
    found = [runner._bucket(num_tokens, 1, num_keys, whole_gpu=True) for num_tokens, num_keys in steps]
    assert [bucket and bucket.num_tokens for bucket in found] == [512, 1024, None, 2048]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("num_tokens", "starts", "fits"),
    [(600, [0], True), (200, [0, 0, 0], True), (600, [41], False), (200, [0, 0, 41], False), (500, [41], True)],
)
def test_a_graph_that_gathers_keys_replays_no_more_than_it_has_room_for(
    num_tokens: int, starts: list[int], fits: bool, engine: Engine
) -> None:
    runner = PromptRunner(engine, 64, 8)
    graph = (cast(torch.cuda.CUDAGraph, FakeGraph()), torch.zeros(8, dtype=torch.int32))
    buckets = [Bucket(512, 8, True), Bucket(640, 8, True)]
    runner.graphs = dict.fromkeys(buckets, graph)
    num_seqs, num_keys = len(starts), sum(start + num_tokens for start in starts)
    assert (runner._bucket(num_seqs * num_tokens, num_seqs, num_keys, whole_gpu=True) is not None) == fits


@pytest.mark.medium
@pytest.mark.parametrize("use_graphs", [True, False])
def test_a_share_of_the_gpu_changes_no_token(use_graphs: bool, engine: Engine, checkpoint: Checkpoint) -> None:
    runner = PromptRunner(engine, 64, 8, make_share(50, engine.device))
    if use_graphs and engine.device.type == "cuda":
        runner.capture()
    lengths = [[40, 3], [41], [30, 2, 9], [17], [5, 6, 7, 8], [50], [11], [29, 28]]
    steps = [[prompt(length, engine) for length in step] for step in lengths]
    for offset in range(2):  # so that every step runs on either stream
        whole_gpu = [bool((i + offset) % 2) for i in range(len(steps))]
        pending = [runner.launch(step, whole_gpu=whole_gpu[i]) for i, step in enumerate(steps[:2])]
        for i, step in enumerate(steps):
            assert pending[i].tokens() == expected(checkpoint, step)
            pending += [runner.launch(ahead, whole_gpu=whole_gpu[i + 2]) for ahead in steps[i + 2 : i + 3]]


@pytest.mark.medium
def test_a_prompt_whose_chunks_alternate_between_streams_finds_its_keys(engine: Engine, checkpoint: Checkpoint) -> None:
    runner, whole = PromptRunner(engine, 64, 8, make_share(50, engine.device)), prompt(120, engine)
    pieces = [whole.token_ids[begin : begin + 24] for begin in range(0, 120, 24)]
    chunks = [PromptChunk(ids, 24 * i, whole.tables, GREEDY, is_last=i == 4) for i, ids in enumerate(pieces)]
    pending = []
    for i, chunk in enumerate(chunks):
        pending.append(runner.launch([chunk], whole_gpu=bool(i % 2)))
        if i:
            assert pending[i - 1].tokens() == [None]
    assert pending[-1].tokens() == expected(checkpoint, [whole])


@pytest.mark.medium
@pytest.mark.parametrize("bucket", [(40, 2), (64, 2), (64, 8)])
def test_padding_to_a_bucket_changes_nothing_and_writes_nothing(
    bucket: tuple[int, int], engine: Engine, checkpoint: Checkpoint
) -> None:
    runner, chunks = PromptRunner(engine, 64, 8), [prompt(length, engine) for length in (23, 17)]
    runner.run([prompt(9, engine), prompt(11, engine), prompt(13, engine)])  # leaves its traces in the buffers
    before = engine.pool.caches[0].clone()
    with torch.inference_mode():
        runner.buffers.fill(chunks, *bucket)
        batch = runner.buffers.forward_batch(*bucket, max_query_len=bucket[0], max_seq_len=engine.max_len, num_keys=0)
        sampled, _ = runner._step(batch)
    assert sampled[:2].tolist() == [token.token_id for token in expected(checkpoint, chunks)]
    owned = [block_id for chunk in chunks for block_id in chunk.tables[0]]
    others = [i for i in range(engine.pool.shape.num_ids) if i not in owned]
    assert torch.equal(engine.pool.caches[0][others].nan_to_num(7.0), before[others].nan_to_num(7.0))


@pytest.mark.medium
def test_a_seeded_draw_does_not_depend_on_its_neighbours(engine: Engine) -> None:
    runner = PromptRunner(engine, 64, 8)
    seeded = SamplingParams(temperature=1.0, top_p=0.9, seed=5)
    chunks = [prompt(20, engine, seeded), prompt(21, engine, SamplingParams(temperature=2.0, seed=6))]
    assert runner.run(chunks)[0] == runner.run(chunks[:1])[0]


def told(pending: PendingPrompts) -> list[dict[int, tuple[Logprobs, int]]]:
    """Of each chunk, by position, as the router reads it."""
    pending.tokens()
    found: list[dict[int, tuple[Logprobs, int]]] = []
    for scores in pending.scores():
        found.append({})
        for message in [] if scores is None else scores.messages("p", 1, "a", 0):
            message = cast(PromptLogprobs, decode(encode(message)))
            ids, values = unpack_ids(message.logprob_ids), unpack_floats(message.logprobs)
            counts, ranks = unpack_ids(message.num_logprobs), unpack_ids(message.ranks)
            ends = list(itertools.accumulate(counts))
            for i, (end, count, rank) in enumerate(zip(ends, counts, ranks, strict=True)):
                entries = slice(end - count, end)
                logprobs = Logprobs(tuple(ids[entries]), tuple(values[entries]))
                found[-1][message.first_position + i] = (logprobs, rank)
    return found


@pytest.mark.medium
def test_a_prompt_in_chunks_beside_others_tells_of_each_of_its_tokens_once(
    engine: Engine, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_scores, "SLICE_ROWS", 8)
    monkeypatch.setattr(prompt_scores, "MESSAGE_TOKENS", 5)
    runner, (_, model) = PromptRunner(engine, 64, 8), checkpoint("qwen3-tied")
    if engine.device.type == "cuda":
        runner.capture()
    for num_wanted, first_scored, num_outputs in ((1, 0, 0), (5, 0, 0), (21, 20, 0), (3, 0, 4)):
        whole = prompt(50, engine)
        found: dict[int, tuple[Logprobs, int]] = {}
        for begin, end in ((0, 1), (1, 17), (17, 47), (47, 50)):
            others = [prompt(3, engine), prompt(9, engine, SamplingParams(temperature=0.0, num_logprobs=2))]
            chunk = replace(
                whole, token_ids=whole.token_ids[begin:end], start=begin, is_last=end == 50,
                sequence_ids=whole.token_ids, num_outputs=num_outputs, num_prompt_logprobs=num_wanted,
                first_scored=first_scored,
            )  # fmt: skip
            pending = runner.launch([others[0], chunk, others[1]])
            tokens = pending.tokens()
            assert [tokens[0], tokens[2] and OutputToken(tokens[2].token_id)] == expected(checkpoint, others)
            assert tokens[1] == (expected(checkpoint, [whole])[0] if end == 50 else None)
            before, new, after = told(pending)
            assert not before and not after and not set(found) & set(new)
            found |= new
            for other in others:
                engine.allocator.free(other.tables[0])
        engine.allocator.free(whole.tables[0])
        assert set(found) == set(range(max(1, first_scored), 50 - num_outputs))
        with torch.inference_mode():
            law = model(torch.tensor([whole.token_ids])).logits[0].log_softmax(dim=-1)
        for position, (logprobs, rank) in found.items():
            own, token_id = law[position - 1], whole.token_ids[position]
            assert logprobs.token_ids[0] == token_id and len(logprobs.values) == num_wanted
            assert logprobs.values == pytest.approx(own[list(logprobs.token_ids)].tolist(), abs=1e-3)
            likeliest = own.topk(num_wanted - 1).values.tolist() if num_wanted > 1 else []
            assert list(logprobs.values[1:]) == pytest.approx(likeliest, abs=1e-3)
            assert (own > own[token_id] + 1e-3).sum() < rank <= (own >= own[token_id] - 1e-3).sum()
