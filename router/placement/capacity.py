"""Facts about all workers together: who takes work, how long a sequence may be, where cached prefixes can differ."""

from collections.abc import Iterable, Iterator

from common.wire.messages.worker import Role
from common.wire.values.kv_layout import KVLayout
from router.placement.member import NO_TRANSPORT, Member


def takers(workers: Iterable[Member], role: Role) -> Iterator[Member]:
    """Yield workers of a role open for new work; a prefill worker without handoffs is useless."""
    return (
        worker
        for worker in workers
        if worker.ready.role is role
        and not (worker.draining or worker.in_reserve)
        and (role is Role.DECODE or worker.ready.transport != NO_TRANSPORT)
    )


def most_tokens(workers: Iterable[Member]) -> int:
    """Return the most tokens, prompt and outputs together, that some worker takes."""
    return max((worker.ready.max_model_len for worker in takers(workers, Role.DECODE)), default=0)


def max_model_len(workers: Iterable[Member], limit: int) -> int:
    """Return `limit`, or less if no registered decode worker takes so many tokens.

    Standbys do not count: a length taken only by standbys is not promised. Requests too long for a standby wait for
    others.
    """
    decodes = [worker.ready for worker in workers if worker.ready.role is Role.DECODE]
    return min(limit, max((ready.max_model_len for ready in decodes if not ready.standby), default=limit))


def has_choice(workers: Iterable[Member]) -> bool:
    """Tell whether the place of cached prefixes can influence a choice."""
    return len({worker.pool for worker in workers}) > 1 or any(worker.ready.short_prompt_tokens for worker in workers)


def layouts(workers: Iterable[Member]) -> set[KVLayout]:
    """Return layouts of reusable blocks; none if their place cannot influence a choice."""
    if not has_choice(workers):
        return set()
    shared = {id(worker.layout): worker.layout for worker in workers}  # each is there once, and takes long to hash
    return {layout for layout in shared.values() if layout.is_reusable}
