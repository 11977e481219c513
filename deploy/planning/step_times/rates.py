"""How long workers take on one kind of GPU with one model: measured points, as a JSON file.

`python -m benchmarks.rates` makes such files of rows of results.csv. They hold points, not fits: what lies between
two of them is said in `costs`, what another model takes in `scaling`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common.base.errors import ConfigError
from deploy.planning.step_times.shape import ModelShape, shape_of

SHIPPED = Path(__file__).parent / "measured"
MAX_BYTES = 1 << 20
"""Of a file of rates."""
MOST_MS = 1e7
"""Of a step or a copy."""

Points = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Where:
    """What differs by whether a prefill and a decode worker share a GPU."""

    request_ms: float  # of the time to a first token, what is no prompt step: HTTP, messages, launches
    handoff_ms: float  # of the gap behind a first token, what is neither a decode step nor a copy


@dataclass(frozen=True, slots=True)
class Rates:
    """Times in milliseconds.

    prompts: tokens of a lone prompt, percent of the GPU that it has, time; in steps of `step_tokens`.
    steps: rows of a decode step, tokens of context of each, time, and the least time in which so much can be read.
    copies: tokens of a prompt, time in which its KV blocks move between two GPUs of a host.
    beside_steps: rows that decode beside a prompt which has `share` percent of the GPU, factor by which
        their steps are longer than alone.
    beside_prompt: factor by which that prompt is longer than alone with that share.
    beside_prompt_ms: and what is added to each of its steps, whatever their tokens.
    found_ms_per_1000: of the time to a first token, for each thousand tokens of the prompt that are there already.
    prefix_kernel_ms: of a decode step that reads once what rows share, what is no step of as many tokens as it reads.
    prefix_kernel_ms_per_1000: and for each thousand tokens that it need not read.
    scattered: of a prompt step whose prompts have too many keys together to be gathered, factor by which attention is
        longer.
    reread: where each row reads what rows share, what that takes, of what as many tokens take that nobody shares.
    router_tokens_per_s: output tokens a second that a router was measured with, at most.
    whole_wait: beside a prompt step that has the whole GPU, what is added to a decode step, of what that prompt step
        takes alone.
    """

    gpu: str
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
    origin: tuple[str, ...]  # which rows

    def __post_init__(self) -> None:
        for name, width in (("prompts", 3), ("steps", 4), ("copies", 2), ("beside_steps", 2)):
            points = getattr(self, name)
            if not points or any(len(point) != width or not all(0 <= x <= MOST_MS for x in point) for point in points):
                raise ConfigError(f"rates of {self.gpu}: {name} = {points!r:.200}: points of {width} numbers")

    @property
    def name(self) -> str:
        return f"{self.model} on {self.gpu}"


def as_json(rates: Rates) -> str:
    """Text of a file, a point a line."""
    text = json.dumps(asdict(rates), indent=1)
    for name in ("prompts", "steps", "copies", "beside_steps"):
        rows = ",\n  ".join(json.dumps(list(point)) for point in getattr(rates, name))
        before = json.dumps({name: asdict(rates)[name]}, indent=1)[3:-2]
        text = text.replace(before, f'"{name}": [\n  {rows}\n ]')
    return text + "\n"


def from_json(text: str, name: str) -> Rates:
    """What a file holds; raises ConfigError, which names it, for anything else."""
    try:
        told: dict[str, Any] = json.loads(text)
        points = {key: tuple(map(tuple, told[key])) for key in ("prompts", "steps", "copies", "beside_steps")}
        rates = Rates(**(told | points | {"shape": shape_of(told["shape"]), "origin": tuple(told["origin"])}))
        return replace(rates, shared=_where(told["shared"]), apart=_where(told["apart"]))
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        raise ConfigError(f"rates of {name}: {error}; write them anew with python -m benchmarks.rates") from None


def _where(told: Mapping[str, float]) -> Where:
    return Where(float(told["request_ms"]), float(told["handoff_ms"]))


def shipped() -> dict[str, Path]:
    """Files of this directory by their names, without the suffix."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.json"))}


def read_rates(name: str) -> Rates:
    """A shipped file by its name, or any other by its path; raises ConfigError if there is none."""
    path = shipped().get(name, Path(name))
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(shipped())
        raise ConfigError(
            f"rates {name!r}: {error}; a file, or one of {known}. How to measure others says baton plan --help"
        ) from None
    return from_json(text, name)
