"""What the wire declares of sampling is what kernels are given, on every way there."""

from dataclasses import fields

import numpy as np
import torch

from common.device.prompt_buffers import PromptBuffers, PromptChunk
from common.device.sampling_tensors import sampling_tensors, sampling_words
from common.kernels.operands import SamplingTensors
from common.wire.sampling_params import PADDING, SAMPLING_COLUMNS, SamplingParams
from tests.layouts import pool_of

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


def test_tensors_and_words_hold_what_was_asked_for() -> None:
    tensors = sampling_tensors(PARAMS, CPU).columns()
    assert [tensor.tolist() for tensor in tensors] == declared(PARAMS)
    words = sampling_words(PARAMS)
    assert {column.dtype for column in words} == {np.dtype(np.int32)}
    assert [torch.from_numpy(c).view(t.dtype).tolist() for c, t in zip(words, tensors, strict=True)] == declared(PARAMS)


def test_a_prompt_step_is_told_the_same_and_its_padding_is_least_work() -> None:
    buffers = PromptBuffers(8, 6, 16, pool_of(1, 4), 100, CPU)
    for params in (PARAMS[::-1], PARAMS):  # twice, so that padding meets what was there before
        buffers.fill([PromptChunk([1], 0, [[1]], each, is_last=True) for each in [*params, params[0]]], 5, 5)
        buffers.fill([PromptChunk([1], 0, [[1]], each, is_last=True) for each in params], 6, 6)
        tensors, _ = buffers.sampling(6)
        assert [tensor.tolist() for tensor in tensors.columns()] == declared([*params, PADDING, PADDING])
