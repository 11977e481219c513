"""Memory that attention kernels of a group of layers share; layers run in sequence, so one of each kind is enough."""

from threading import Lock

from common.kernels.attention.decode_division import MOST_PROGRAMS_PER_SM, limits_for
from common.kernels.attention.decode_parts import MAX_PARTS, PartsWorkspace, make_workspace
from common.kernels.attention.query_parts import QueryParts, make_query_parts
from common.kernels.attention.shared_parts import make_shared_parts, most_shared_slots
from common.kernels.base.attention_operands import SharedParts
from common.kernels.base.gpu import Gpu, gpu_of
from common.ops.base import GroupCache


def max_joins_for(num_rows: int, num_kv_heads: int, gpu: Gpu) -> int:
    """Return the contexts, at most, whose parts are stored in decode steps of up to `num_rows` rows."""
    return limits_for(num_rows, num_kv_heads, MOST_PROGRAMS_PER_SM * gpu.num_sms).max_joins


def parts_bytes(num_rows: int, num_q_heads: int, num_kv_heads: int, head_dim: int, gpu: Gpu) -> int:
    """Return about the bytes of `Workspaces.parts` for decode steps of up to `num_rows` rows."""
    return max_joins_for(num_rows, num_kv_heads, gpu) * MAX_PARTS * num_q_heads * (head_dim + 2) * 4


class Workspaces:
    """Workspaces of a group, made by the first step that needs them, before the capture of any graph.

    Threads that compile kernels ask at the same time.

    Args:
        max_num_seqs: most sequences of a batch with a token each.
    """

    def __init__(self, cache: GroupCache, max_num_seqs: int) -> None:
        self._num_q_heads, self._device = cache.num_q_heads, cache.blocks.device
        self._num_kv_heads, self._head_dim = cache.blocks.shape[4:]
        self._max_num_seqs = max_num_seqs
        self._gpu = gpu_of(self._device)
        self._making = Lock()
        self._parts: PartsWorkspace | None = None
        self._query_parts: QueryParts | None = None
        self._shared_parts: SharedParts | None = None

    def parts(self) -> PartsWorkspace:
        """Return room for parts of contexts in decode steps."""
        with self._making:
            if self._parts is None:
                max_joins = max_joins_for(self._max_num_seqs, self._num_kv_heads, self._gpu)
                heads = (self._num_q_heads, self._num_kv_heads, self._head_dim)
                self._parts = make_workspace(max_joins, *heads, self._device)
            return self._parts

    def query_parts(self) -> QueryParts:
        """Return room for parts of contexts seen by a few queries."""
        with self._making:
            if self._query_parts is None:
                self._query_parts = make_query_parts(self._num_kv_heads, self._head_dim, self._gpu, self._device)
            return self._query_parts

    def shared_parts(self) -> SharedParts:
        """Return room for attention over prefixes shared by rows."""
        with self._making:
            if self._shared_parts is None:
                num_slots, heads = most_shared_slots(self._gpu), (self._num_kv_heads, self._head_dim)
                self._shared_parts = make_shared_parts(self._max_num_seqs, num_slots, *heads, self._device)
            return self._shared_parts
