"""Relations between fields of a message; each field alone was checked before (see `fields`)."""

from common.wire.messages.handoff import DecodeRequest, KVPoolExport, KVProgress
from common.wire.messages.memory import (
    BlocksFreed,
    BlocksLeased,
    BlocksSealed,
    KVOffer,
    PoolLeft,
    PoolWanted,
    PromptBlocks,
)
from common.wire.messages.memory_reports import KVEvents
from common.wire.messages.worker import (
    Inquiry,
    InquiryReply,
    LogprobBatch,
    Message,
    PrefillRequest,
    PromptLogprobs,
    Role,
    TokenBatch,
    WorkerReady,
)
from common.wire.values.fields import ID_BYTES, KEY_BYTES, SHORT_KEY_BYTES
from common.wire.values.kv_layout import CacheKind, Counts, KVLayout
from common.wire.values.packing import unpack_ids
from common.wire.values.sampling_params import SamplingParams


def contradiction(message: Message) -> str:
    """Say why the fields contradict each other; "" for a sound message."""
    match message:
        case TokenBatch():
            columns = (message.attempts, message.output_indices, message.token_ids)
            num_scored = [_num_ids(message.num_logprobs)] if isinstance(message, LogprobBatch) else []
            num_rows = [len(message.request_ids), len(message.finish_reasons), *map(_num_ids, columns), *num_scored]
            return _uneven(*num_rows) or (_misscored(message) if isinstance(message, LogprobBatch) else "")
        case PromptLogprobs():
            return _uneven(_num_ids(message.ranks), _num_ids(message.num_logprobs)) or _misscored(message)
        case Inquiry():
            return _uneven(len(message.request_ids), _num_ids(message.attempts))
        case InquiryReply():
            return _uneven(len(message.request_ids), _num_ids(message.attempts), len(message.are_here))
        case PrefillRequest() | DecodeRequest():
            return _too_many_outputs(message) or _unpaired_biases(message.sampling)
        case WorkerReady():
            has_no_budget = message.role is Role.PREFILL and not message.max_batch_tokens
            problem = "a prefill worker without a budget of tokens" if has_no_budget else ""
            return problem or _unsound(message.kv_layout, message.num_blocks)
        case _:
            return _contradiction_of_blocks(message)


def _contradiction_of_blocks(message: Message) -> str:
    """Say why the fields of a message about KV blocks contradict each other."""
    match message:
        case KVOffer():
            if bool(message.root) != bool(message.digest):
                return "a chain of keys has a root and a digest"
            return _unversioned(message) or _too_many_sealed(message)
        case BlocksLeased() | BlocksFreed() | PoolLeft():
            return _unversioned(message)
        case PromptBlocks():
            return _unversioned(message) or _too_many_sealed(message)
        case BlocksSealed():
            return _unversioned(message) or _uneven(_num_ids(message.block_ids), len(message.keys) // KEY_BYTES)
        case KVEvents():
            num_keys, lengths = len(message.keys) // SHORT_KEY_BYTES, unpack_ids(message.runs)
            return _uneven(sum(lengths), num_keys) or _uneven(len(message.kinds), len(lengths))
        case KVProgress():
            num_blocks = _num_ids(message.block_ids)
            problem = f"{num_blocks} blocks of {message.num_tokens} tokens" if num_blocks > message.num_tokens else ""
            return _unversioned(message) or problem
        case PoolWanted():
            return _unsound(message.layout, message.num_blocks)
        case KVPoolExport():
            return _unsound(message.layout, message.layout.nothing)
        case _:
            return ""


def _uneven(*num_rows: int) -> str:
    """Require equal lengths of all columns."""
    return f"columns of {', '.join(map(str, num_rows))} rows" if len(set(num_rows)) > 1 else ""


def _too_many_sealed(message: KVOffer | PromptBlocks) -> str:
    """Require at most as many sealed blocks as named blocks."""
    num_blocks = _num_ids(message.block_ids)
    return f"{message.num_sealed} of {num_blocks} blocks are sealed" if message.num_sealed > num_blocks else ""


def _unversioned(
    message: BlocksLeased | BlocksFreed | BlocksSealed | PoolLeft | PromptBlocks | KVOffer | KVProgress,
) -> str:
    """Require a generation for each block."""
    return _uneven(_num_ids(message.block_ids), _num_ids(message.generations))


def _unsound(layout: KVLayout, num_blocks: Counts) -> str:
    """Require a width for windows only, a block size of 1 for states, and a number of blocks for each group."""
    for number, group in enumerate(layout.groups):
        if (group.kind is CacheKind.WINDOW) != (group.window > 0):
            return f"groups[{number}] is {group.kind.name} with a window of {group.window}"
        if group.kind is CacheKind.STATE and group.block_size != 1:
            return f"groups[{number}] is {group.kind.name} with a block_size of {group.block_size}"
    return _uneven(len(layout.groups), len(num_blocks))


def _misscored(message: LogprobBatch | PromptLogprobs) -> str:
    """Require a token of the message and a token id for every log-probability."""
    num_wanted = sum(unpack_ids(message.num_logprobs))
    num_ids, num_values = _num_ids(message.logprob_ids), _num_ids(message.logprobs)
    return "" if num_wanted == num_ids == num_values else f"{num_values} logprobs of {num_ids} ids for {num_wanted}"


def _too_many_outputs(message: PrefillRequest | DecodeRequest) -> str:
    """Require a prompt before the outputs, and at least a single output still to come."""
    num_tokens, max_tokens = _num_ids(message.token_ids), message.sampling.max_tokens
    if message.num_outputs < min(num_tokens, max_tokens):
        return ""
    return f"{message.num_outputs} outputs among {num_tokens} tokens, at most {max_tokens} wanted"


def _unpaired_biases(sampling: SamplingParams) -> str:
    """Require a bias for each biased token and no duplicates, because kernels add biases in parallel."""
    num_ids, num_biases = len(sampling.biased_token_ids), len(sampling.biases)
    if num_ids == num_biases == len(set(sampling.biased_token_ids)):
        return ""
    return f"{num_biases} biases of {num_ids} tokens, each once"


def _num_ids(packed: bytes) -> int:
    return len(packed) // ID_BYTES
