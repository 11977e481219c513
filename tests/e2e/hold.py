"""Where workers of a system stand still for as long as a test says, so that nothing depends on who is faster.

What a test wants to meet half way (texts that have begun, prompts that wait) stays there until it lets go. Files beside
the router's socket say how far workers go; `python -m tests.e2e.held_prefill` and `held_decode` heed them.
"""

from pathlib import Path

from common.settings.config import Config


class Hold:
    """A limit that is there while its file is."""

    def __init__(self, directory: Path, name: str) -> None:
        self._path = directory / f"hold-{name}"

    def set(self, limit: int) -> None:
        temporary = self._path.with_suffix(".new")
        temporary.write_text(str(limit))
        temporary.replace(self._path)

    def release(self) -> None:
        self._path.unlink(missing_ok=True)

    def allows(self, number: int) -> bool:
        """Whether it is less than the limit."""
        try:
            return number < int(self._path.read_text())
        except FileNotFoundError:
            return True


class Holds:
    """Those of a system: tokens of a text, steps over prompts, what is taken from other pools, a fault to come."""

    def __init__(self, directory: Path) -> None:
        self.texts, self.prompt_steps = Hold(directory, "texts"), Hold(directory, "prompt-steps")
        self.faults, self.retrievals = Hold(directory, "faults"), Hold(directory, "retrievals")


def holds_of(config: Config) -> Holds:
    """As a worker finds them."""
    return Holds(Path(config.net.router_endpoint.removeprefix("ipc://")).parent)
