"""Options of what programs tell of themselves."""

from dataclasses import dataclass

from common.base.log import FORMS
from common.settings.options import option


@dataclass(frozen=True, slots=True)
class TraceSection:
    """A timeline of the steps of each worker, for `baton trace`."""

    dir: str = option(
        "",
        "directory to which each worker writes the times of its steps, for baton trace; without one none does",
    )
    max_bytes: int = option(
        67_108_864,
        "size of each worker's part; of a longer one the last half at least is kept",
        within=(1 << 16, 1 << 34),
    )


@dataclass(frozen=True, slots=True)
class LogSection:
    """Logging."""

    level: str = option("INFO", "least severe level shown", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    format: str = option("text", "lines for people, or a JSON object each, for programs", choices=FORMS)
