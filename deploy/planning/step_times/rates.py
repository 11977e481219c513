"""Speed of workers on a kind of GPU with a model: measured points, in a JSON file.

`python -m benchmarks.rates` makes such files from rows of results.csv. Files hold points, not fits: `costs`
interpolates between points, and `scaling` estimates other models.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from common.base.errors import ConfigError
from common.base.json_file import JsonObject
from common.base.plain_file import read_plain
from common.models.forms import Capability
from deploy.planning.step_times.shape import ModelShape

SHIPPED = Path(__file__).parent / "measured"
MAX_BYTES = 1 << 20
"""Limit of a file of rates."""
MOST_MS = 1e7
"""Limit of a step or a copy."""

Points = tuple[tuple[float, ...], ...]
POINTS = {"prompts": 3, "steps": 4, "copies": 2, "beside_steps": 2}
"""Fields with points, and numbers in a point."""


@dataclass(frozen=True, slots=True)
class Where:
    """Overhead of requests, by whether a prefill and a decode worker share a GPU."""

    request_ms: float  # TTFT without prompt steps: HTTP, messages, launches
    handoff_ms: float  # first gap without decode steps and copies


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates; times in milliseconds.

    prompts: tokens of a lone prompt, percent of the GPU, time; in steps of `step_tokens`.
    steps: rows of a decode step, context tokens of each row, time, and the least time to read so many bytes.
    copies: tokens of a prompt, time to copy its KV blocks between two GPUs of a host.
    beside_steps: decode rows beside a prompt with `share` percent of the GPU, factor of their step time.
    beside_prompt: factor of the prompt's time beside decode steps.
    beside_prompt_ms: addition to each of the prompt's steps, whatever the tokens.
    found_ms_per_1000: addition to the TTFT for each thousand cached tokens of the prompt.
    prefix_kernel_ms: addition to a decode step that reads shared prefixes once.
    prefix_kernel_ms_per_1000: addition for each thousand spared tokens.
    scattered: factor of attention for prompt steps with too many keys to gather.
    reread: time share of tokens read by every row though shared, relative to unshared tokens.
    router_tokens_per_s: largest measured output tokens a second of a router.
    whole_wait: addition to a decode step beside a prompt step with the whole GPU, relative to the prompt step alone.
    """

    gpu: str
    capability: Capability  # of the GPU
    memory_bytes: int  # of a GPU
    model: str
    shape: ModelShape
    step_tokens: int
    prompts: Points
    steps: Points
    copies: Points
    share: int
    beside_steps: Points
    beside_prompt: float
    beside_prompt_ms: float
    whole_wait: float
    shared: Where
    apart: Where
    found_ms_per_1000: float
    prefix_kernel_ms: float
    prefix_kernel_ms_per_1000: float
    scattered: float
    reread: float
    router_tokens_per_s: float
    origin: tuple[str, ...]  # rows of results.csv

    def __post_init__(self) -> None:
        for name, width in POINTS.items():
            points = getattr(self, name)
            if not points or any(len(point) != width or not all(0 <= x <= MOST_MS for x in point) for point in points):
                raise ConfigError(f"rates of {self.gpu}: {name} = {points!r:.200}: points of {width} numbers")

    @property
    def name(self) -> str:
        return f"{self.model} on {self.gpu}"


def from_json(text: str, name: str) -> Rates:
    """Parse the text of a file; raises ConfigError with the file's name for other text."""
    try:
        told: JsonObject = json.loads(text)
        told |= {key: tuple(map(tuple, told[key])) for key in POINTS} | {"origin": tuple(told["origin"])}
        told |= {"capability": tuple(told["capability"])}
        told |= {"shape": ModelShape(**told["shape"])} | {key: Where(**told[key]) for key in ("shared", "apart")}
        return Rates(**told)
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        raise ConfigError(f"rates of {name}: {error}; write them anew with python -m benchmarks.rates") from None


def shipped() -> dict[str, Path]:
    """Return the files of this directory by name, without suffix."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.json"))}


def read_rates(name: str) -> Rates:
    """Read a shipped file by name, or another file by path; raises ConfigError if there is none."""
    try:
        text = read_plain(shipped().get(name, Path(name)), MAX_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(shipped())
        raise ConfigError(
            f"rates {name!r}: {error}; a file, or one of {known}. How to measure others says baton plan --help"
        ) from None
    return from_json(text, name)
