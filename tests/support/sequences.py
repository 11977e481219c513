"""Sequences of workers, and the blocks that their owners hold."""

from collections.abc import Iterable, MutableSequence, Sequence
from typing import Any

from common.kv.blocks import Allocator
from common.kv.tables import Tables, held_by
from common.serving.prompts.prefixes import PromptPrefixes
from common.serving.prompts.scheduler import PromptScheduler
from common.settings.config import PrefillSection
from common.wire.values.sampling_params import SamplingParams
from decode_worker.arrivals.ahead import Ahead
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sequence import DecodeSequence
from decode_worker.worker import DecodeWorker
from prefill_worker.sequence import PrefillSequence
from prefill_worker.worker import prompt_order
from tests.support.messages import decode_request, prefill_request


def prompt_sequence(name: str, token_ids: Iterable[int], **fields: Any) -> PrefillSequence:
    """A prompt that a prefill worker has got, for decode worker `d`."""
    return PrefillSequence.of(prefill_request(name, token_ids, **fields))


def decode_sequence(
    name: str,
    token_ids: MutableSequence[int],
    num_outputs: int = 0,
    sampling: SamplingParams | None = None,
    tables: Tables = (),
    **fields: Any,
) -> DecodeSequence:
    """A text that a decode worker has got."""
    how = sampling or SamplingParams()
    request = decode_request(name, (), num_outputs=num_outputs, sampling=how, **fields)
    return DecodeSequence(request, token_ids, num_outputs, tables)


def prompt_scheduler(
    section: PrefillSection,
    allocator: Allocator,
    max_len: int,
    prefixes: PromptPrefixes[PrefillSequence],
    *,
    batching: bool = True,
) -> PromptScheduler[PrefillSequence]:
    """A prefill worker's scheduler."""
    return PromptScheduler(prompt_order(section, batching=batching), allocator, max_len, prefixes)


def taken(scheduler: PromptScheduler[Any], prompt: PrefillSequence) -> Sequence[int]:
    """Blocks of a complete prompt, which is the test's now."""
    return held_by(scheduler.take(prompt))


def ending(scheduler: PromptScheduler[Any]) -> list[Any]:
    """Prompts whose tokens are all launched."""
    return [prompt for prompt in scheduler.prompts.values() if not prompt.num_left]


def is_ending(scheduler: PromptScheduler[Any], prompt: Any) -> bool:
    """Whether all tokens of a prompt are launched, and the scheduler still has it."""
    return not prompt.num_left and scheduler.prompts.get(prompt.key) is prompt


def blocks_of_prompts(scheduler: PromptScheduler[Any]) -> list[Sequence[int]]:
    """Blocks of every prompt, also of removed ones, and those that are granted."""
    owners = [*scheduler.prompts.values(), *scheduler.removed]
    return [[*held_by(prompt.tables), *prompt.beginning.granted] for prompt in owners]


def blocks_of_worker(worker: DecodeWorker) -> list[Sequence[int]]:
    """Blocks of what a decode worker decodes, and of prompts that it computes itself."""
    return [*blocks_of_rows(worker.scheduler), *blocks_of_prompts(worker.local_prompts.scheduler)]


def blocks_ahead(ahead: Ahead) -> list[Sequence[int]]:
    """Blocks of prompts that are pulled ahead, or were."""
    return [held_by(begun.tables) for begun in [*ahead.begun.values(), *ahead.dropped]]


def blocks_of_rows(scheduler: DecodeScheduler) -> list[Sequence[int]]:
    """Blocks of every sequence that decodes, has ended or has them reserved."""
    owners = [*scheduler.reserved.values(), *scheduler.active.values(), *scheduler.lingering]
    return [held_by(sequence.tables) for sequence in owners]
