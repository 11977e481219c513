"""Relations between columns: packed numbers, names or bytes, with an entry for each row of a message."""

from common.wire.values.fields import ID_BYTES
from common.wire.values.packing import unpack_ids


def num_ids(packed: bytes) -> int:
    return len(packed) // ID_BYTES


def uneven(*num_rows: int) -> str:
    """Require equal lengths of all columns: say why not, "" for equal lengths, as the functions below."""
    return f"columns of {', '.join(map(str, num_rows))} rows" if len(set(num_rows)) > 1 else ""


def misscored(num_rows: int, num_logprobs: bytes, logprob_ids: bytes, logprobs: bytes) -> str:
    """Require a number in `num_logprobs` for each row, and as many token ids and log-probabilities: say why not."""
    num_wanted, num_named, num_values = sum(unpack_ids(num_logprobs)), num_ids(logprob_ids), num_ids(logprobs)
    if num_wanted == num_named == num_values:
        return uneven(num_rows, num_ids(num_logprobs))
    return f"{num_values} logprobs of {num_named} ids for {num_wanted}"


def unsealed(block_ids: bytes, generations: bytes, num_sealed: int) -> str:
    """Require a generation for each block, and at most as many sealed blocks as blocks: say why not."""
    num_blocks = num_ids(block_ids)
    if num_sealed > num_blocks:
        return f"{num_sealed} of {num_blocks} blocks are sealed"
    return uneven(num_blocks, num_ids(generations))
