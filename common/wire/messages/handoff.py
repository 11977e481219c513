"""Messages of a handoff between a prefill and a decode worker; `worker` has the rules for all messages."""

from common.wire.messages.senders import FromWorker, OfAttempt
from common.wire.values.fields import (
    BlockIds,
    ClientId,
    Count,
    Epoch,
    Label,
    OptionalLabel,
    Positive,
    Priority,
    RequestId,
    Text,
    TokenIds,
)
from common.wire.values.kv_layout import KVLayout
from common.wire.values.packing import num_ids, uneven
from common.wire.values.sampling_params import SamplingParams


class DecodeRequest(OfAttempt, tag=37):
    """router -> decode worker: a prefill worker computes a prompt, and will offer the blocks (see `KVOffer`).

    Sent before the `PrefillRequest`, where the fields are explained.
    """

    token_ids: TokenIds
    num_outputs: Count
    sampling: SamplingParams
    priority: Priority
    client: ClientId
    num_known: Count  # prompt tokens that the router expects in the decode worker's pool

    def contradiction(self) -> str:
        return self.sampling.problem(num_ids(self.token_ids), self.num_outputs)


class KVPoolExport(FromWorker, tag=40):
    """prefill worker -> decode worker, after dialing: the location of the prefill worker's pool.

    A decode worker with a different pool connects to the memory server there as a peer.
    decode worker -> prefill worker, after proof of the path: the location of the decode worker's pool, if different.
    The first block of each group holds a pattern made from `pool_id`.
    """

    transport: Label
    device_uuid: OptionalLabel  # "" on a CPU
    pool_id: Epoch  # workers of equal pools pull nothing
    memory_socket: Label  # path of the pool's memory server
    layout: KVLayout
    host: OptionalLabel = ""  # workers of equal hosts reach each other's memory servers by path
    gate: OptionalLabel = ""  # endpoint of the memory server for other hosts; "" if there is none

    def contradiction(self) -> str:
        return self.layout.problem(self.layout.nothing)


class KVProgress(FromWorker, tag=45):
    """prefill worker -> decode worker: complete blocks of a prompt still being computed.

    The message is a hint and may be ignored: no process keeps the blocks for the receiver. Copies of the blocks are
    valid only if a `KVOffer` with equal generations follows, because then the blocks belonged to the prompt throughout.
    """

    request_id: RequestId
    attempt: Count
    num_tokens: Positive  # whole prompt, with outputs before a replay
    block_ids: BlockIds  # append-only groups' blocks from the first place on; empty: no offer will follow
    generations: BlockIds

    def contradiction(self) -> str:
        num_blocks = num_ids(self.block_ids)
        if num_blocks > self.num_tokens:
            return f"{num_blocks} blocks of {self.num_tokens} tokens"
        return uneven(num_blocks, num_ids(self.generations))


class KVPathResult(FromWorker, tag=44):
    """decode worker -> prefill worker: answer to `KVPoolExport`, repeated on a change; an empty error means proven."""

    is_shared: bool  # both workers use the pool, so nothing is pulled
    error: Text
