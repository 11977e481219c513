"""The supervisor's end of a spare: one process that any worker can be started again in."""

import asyncio
import signal
from collections.abc import Mapping, Sequence

from deploy.child import Child
from deploy.console import Console
from deploy.launch_plan import Kind, ProcessSpec
from deploy.placement import Placement
from deploy.spare import order

SHARED_MODULES = ("common.serving.worker_main", "prefill_worker.worker", "decode_worker.worker")
GPU_MODULES = ("common.ops.cuda_ops",)
SPARE_MODES = ("auto", "on", "off")
NEXT_S = 10.0
"""After one was taken: the worker that it became has the cores to itself until then."""


def spare_modules(mode: str, placements: Sequence[Placement]) -> tuple[str, ...]:
    """What a spare for these workers imports; nothing where there is none."""
    has_gpus = any(placement.gpu is not None for placement in placements)
    if mode == "off" or (mode == "auto" and not has_gpus):
        return ()
    return (*SHARED_MODULES, *(GPU_MODULES if has_gpus else ()))


class Spares:
    """Keeps one ready, from the first `renew` on.

    Args:
        modules: what workers import; empty for no spare.
    """

    def __init__(self, modules: tuple[str, ...], environ: Mapping[str, str], console: Console) -> None:
        self._spec = ProcessSpec("spare", "deploy.spare", modules, Kind.WORKER)
        self._environ, self._console = environ, console
        self._child: Child | None = None
        self._next: asyncio.Task[None] | None = None

    def renew(self, delay_s: float = 0.0) -> None:
        """Start one, `delay_s` from now."""
        if self._spec.flags:
            self._next = asyncio.create_task(self._start(delay_s))

    async def become(self, spec: ProcessSpec) -> Child | None:
        """The spare as that process, whether or not its imports are over; None if there is none."""
        child, self._child = self._child, None
        if child is None:
            return None
        self.renew(NEXT_S)
        if not await child.become(spec, order(spec)):
            return None
        self._console.say(f"{spec.name} is started in the spare process, pid {child.pid}", "I")
        return child

    async def end(self) -> None:
        """None is kept any more."""
        if self._next is not None:
            self._next.cancel()
        child, self._child = self._child, None
        if child is not None:
            child.signal(signal.SIGKILL)
            await child.ended()

    async def _start(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        try:
            self._child = await Child.start(self._spec, self._environ, self._console, has_input=True)
        except OSError as error:  # workers are started without one
            self._console.say(f"no spare process: {error}", "W")
