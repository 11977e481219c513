"""A system whose router also dispatches for fronts."""

from collections.abc import Sequence
from pathlib import Path

from tests.e2e.held_system import HeldSystem


class Fronts(HeldSystem):
    """Its fronts are given all flags of its router."""

    def __init__(
        self, model: Path, silence_s: float = 60.0, *, flags: Sequence[str] = (), router_flags: Sequence[str] = ()
    ) -> None:
        super().__init__(model, *flags)
        self.silence_s = silence_s
        self.router_flags = ["--router-front-endpoint", f"ipc://{self.directory.name}/front", *router_flags]

    def start_front(self, name: str, *flags: str) -> str:
        """Start a front; return its URL."""
        self._spawn_serving(name, "router.front", "--router-port", "0", *self.router_flags, *flags)
        url = self._find(name, "serving http://").split()[-1]
        self._find(name, "serves; open choices")
        return url
