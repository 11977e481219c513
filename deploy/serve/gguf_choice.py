"""Choice of a GGUF file among those of a directory or a repository."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from common.base.errors import ConfigError
from common.checkpoint.gguf.model_file import PART, is_gguf, model_name

MMPROJ = "mmproj"
_SHOWN = 8


def gguf_in(directory: Path) -> Path | None:
    """Return the only model in GGUF of a directory, None without any; raises ConfigError for several."""
    models = models_among(path.name for path in directory.iterdir() if not path.is_dir())
    if len(models) > 1:
        raise ConfigError(f"{directory} has several models in GGUF: {_listed(models)}; name one of these files")
    return directory / models[0] if models else None


def chosen(names: Iterable[str], wanted: str, repository: str) -> str:
    """Return the file of a repository, the first part of several, that `wanted` names.

    Args:
        names: of all files, with their folders.
        wanted: a file's name, with or without folders, or the end of it, such as Q4_K_M, in capitals or not.

    Raises ConfigError if there is none or more than one.
    """
    models = models_among(names)
    found = [name for name in models if _is_meant(name, wanted)]
    if len(found) == 1:
        return found[0]
    if not models:
        raise ConfigError(f"{repository} has no model in GGUF; leave {wanted!r} out, to serve its safetensors")
    said = f"has several files {wanted!r}" if found else f"has no file {wanted!r}"
    raise ConfigError(f"{repository} {said}; {which_one(found or models, repository)}")


def which_one(names: Sequence[str], repository: str) -> str:
    """Return the request to name one file of a repository."""
    return f"name one of {_listed([f'{repository}:{name}' for name in names])}, or by its end, {repository}:Q4_K_M"


def models_among(names: Iterable[str]) -> list[str]:
    """Return the names of models in GGUF, of split ones that of the first part."""
    files = {name for name in names if is_gguf(Path(name)) and MMPROJ not in PurePosixPath(name).name.lower()}
    return sorted({_first(name) for name in files})


def parts_named(name: str) -> list[str]:
    """Return the names of all parts of a file, of which `name` is one."""
    found = PART.fullmatch(PurePosixPath(name).name)
    if found is None:
        return [name]
    count = int(found["count"])
    return [str(PurePosixPath(name).with_name(_part_name(found, number))) for number in range(1, count + 1)]


def _first(name: str) -> str:
    return parts_named(name)[0]


def _part_name(found: re.Match[str], number: int) -> str:
    return f"{found['name']}-{number:05}-of-{found['count']}{found[0][-len('.gguf') :]}"


def _is_meant(name: str, wanted: str) -> bool:
    if is_gguf(Path(wanted)):
        return _first(wanted) in (name, PurePosixPath(name).name)
    return re.search(rf"(?:^|[-.]){re.escape(wanted)}$", model_name(Path(name)), re.IGNORECASE) is not None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
