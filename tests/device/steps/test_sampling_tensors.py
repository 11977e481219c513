"""What the wire declares of sampling is what kernels are given, on every way there."""

from dataclasses import fields

import pytest
import torch

from common.device.steps.prompt_buffers import PromptBuffers, PromptChunk
from common.device.steps.row_state import ALIGNMENT_WORDS, RowLayout, row_record
from common.device.steps.warm_up import sampling_tensors
from common.kernels.base.sampling_operands import SamplingTensors
from common.wire.values.sampling_params import PADDING, SAMPLING_COLUMNS, SamplingParams
from tests.support.layouts import pool_of

CPU = torch.device("cpu")
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.75, top_k=3, top_p=0.5, min_p=0.125, seed=(1 << 63) - 1),
    SamplingParams(temperature=2.0, top_k=(1 << 31) - 1, top_p=0.25, min_p=0.5, seed=1 << 40),
    SamplingParams(presence_penalty=-1.5, frequency_penalty=0.25, repetition_penalty=1.5, num_logprobs=21),
]


def declared(params: list[SamplingParams]) -> list[list[float]]:
    return [column.values(params) for column in SAMPLING_COLUMNS]


def test_kernels_take_the_columns_that_are_declared_in_that_order() -> None:
    assert [field.name for field in fields(SamplingTensors)] == [column.name for column in SAMPLING_COLUMNS]


def test_tensors_hold_what_was_asked_for() -> None:
    assert [tensor.tolist() for tensor in sampling_tensors(PARAMS, CPU).columns()] == declared(PARAMS)


@pytest.mark.parametrize("max_rows", [4, 5, 63, 64, 65])
def test_a_row_of_a_batch_holds_what_its_record_says_and_the_others_what_they_held(max_rows: int) -> None:
    layout = RowLayout(max_rows, 10)
    state, padding = layout.make_state(CPU), [PADDING] * (max_rows - len(PARAMS))
    sampling = state.sampling.columns()
    prefixes = [state.prefixes.numbers, state.prefixes.num_tokens]
    heads = [state.token_ids, state.positions, state.seq_lens]
    columns = [*heads, state.state_slots, *prefixes, *sampling, state.block_tables]
    begins = [column.data_ptr() - state.words.data_ptr() for column in columns]
    assert begins == sorted(begins) and not any(begin % (4 * ALIGNMENT_WORDS) for begin in begins)
    assert [column.tolist() for column in sampling] == declared([PADDING] * max_rows)
    assert [column.tolist() for column in prefixes] == [[-1] * max_rows, [0] * max_rows]
    for row, params in reversed(list(enumerate(PARAMS))):
        record = torch.frombuffer(bytearray(row_record(100 + row, (row, 16 * row), params)), dtype=torch.int32)
        state.words[torch.from_numpy(layout.record_places[row]).long()] = record
    assert [column.tolist() for column in sampling] == declared([*PARAMS, *padding])
    assert state.state_slots[: len(PARAMS)].tolist() == [100 + row for row in range(len(PARAMS))]
    told = [[row if row < len(PARAMS) else -1 for row in range(max_rows)]]
    told.append([16 * row if row < len(PARAMS) else 0 for row in range(max_rows)])
    assert [column.tolist() for column in prefixes] == told
    for column in (*heads, state.block_tables):
        assert not column.any()


def test_a_prompt_step_is_told_the_same_and_its_padding_is_least_work() -> None:
    buffers = PromptBuffers(8, 6, 16, pool_of(1, 4), 100, CPU)
    for params in (PARAMS[::-1], PARAMS):  # twice, so that padding meets what was there before
        buffers.fill([PromptChunk([1], 0, [[1]], each, is_last=True) for each in [*params, params[0]]], 5, 5)
        buffers.fill([PromptChunk([1], 0, [[1]], each, is_last=True) for each in params], 6, 6)
        tensors, _ = buffers.sampling(6)
        assert [tensor.tolist() for tensor in tensors.columns()] == declared([*params, PADDING, PADDING])
