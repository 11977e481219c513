"""Reader of a trace: the files of all workers, as far as readable."""

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from common.base.errors import ConfigError
from common.base.json_file import JsonObject
from common.base.plain_file import open_plain
from common.base.trace_file import SUFFIX


class Slice(NamedTuple):
    """A stretch of time on a track of a process."""

    track: int
    name: str
    begin_ns: int
    dur_ns: int
    args: JsonObject | None = None

    @property
    def end_ns(self) -> int:
        return self.begin_ns + self.dur_ns


@dataclass(slots=True)
class Part:
    """Slices of a start of a worker, by time; outer slices come before inner slices."""

    role: str
    id: str
    epoch: int
    pid: int
    host: str
    boot: str
    monotonic_ns: int
    unix_ns: int
    slices: list[Slice] = field(default_factory=list)
    name: str = ""

    @property
    def lead_ns(self) -> int:
        """The wall clock minus the monotonic clock."""
        return self.unix_ns - self.monotonic_ns

    def on(self, track: int, name: str) -> list[Slice]:
        return [each for each in self.slices if each.track == track and each.name == name]


def read_parts(directory: Path, last_s: float = math.inf) -> tuple[list[Part], list[str]]:
    """Return the parts on a common clock, or their last seconds, and what was left out.

    Raises ConfigError if there is no slice.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory; name the one that was given to --trace")
    parts: dict[tuple[str, str, int], Part] = {}
    problems: list[str] = []
    clock: Part | None = None
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        read, problem = _read(path)
        if problem:
            problems.append(f"{path.name}: {problem}")
        if read is None:
            continue
        clock = clock or read
        late_ns = 0 if read.boot == clock.boot else read.lead_ns - clock.lead_ns  # another machine: by the wall clock
        part = parts.setdefault((read.role, read.id, read.epoch), replace(read, slices=[]))
        part.slices += [each._replace(begin_ns=each.begin_ns + late_ns) for each in read.slices]
    end_ns = max((each.end_ns for part in parts.values() for each in part.slices), default=0)
    found = [part for part in parts.values() if _sort(part, end_ns - last_s * 1e9)]
    if not found:
        why = "; ".join(problems) or f"no {SUFFIX} file with a step"
        raise ConfigError(f"{directory}: nothing was traced there ({why}); name the one that was given to --trace")
    found.sort(key=lambda part: (part.role != "prefill", part.id, part.slices[0].begin_ns))
    _name(found)
    return found, problems


def _sort(part: Part, since_ns: float) -> bool:
    """Sort slices by time, and drop those before `since_ns`; tell whether any are left."""
    part.slices = sorted(
        (each for each in part.slices if each.end_ns >= since_ns), key=lambda each: (each.begin_ns, -each.dur_ns)
    )
    return bool(part.slices)


def _name(parts: list[Part]) -> None:
    """Name each part by its worker, with the number of the start if there are several."""
    for part in parts:
        starts = [each for each in parts if (each.role, each.id) == (part.role, part.id)]
        part.name = f"{part.id}, start {starts.index(part) + 1}" if len(starts) > 1 else part.id


def _read(path: Path) -> tuple[Part | None, str]:
    """Return a file's part, and its unreadable lines in words; a killed worker leaves a cut last line."""
    bad = []
    try:
        with open(path, encoding="utf-8", errors="replace", opener=open_plain) as file:
            part = Part(**json.loads(file.readline()))
            for number, line in enumerate(file, 2):
                try:
                    part.slices.append(Slice(**json.loads(line)))
                except (ValueError, TypeError):
                    bad.append(number)
    except OSError as error:
        return None, error.strerror or "unreadable"
    except (ValueError, TypeError):
        return None, "its first line names no worker"
    return part, f"lines without a slice: {', '.join(map(str, bad[:5]))}" if bad else ""
