"""Become the program of a container of compose.yaml, on the model named to compose.

    python -P -m deploy.containers.container model MODEL                   # check for the model, or download it.
    python -P -m deploy.containers.container secret PATH                   # make a secret, unless there is one.
    python -P -m deploy.containers.container PROGRAM MODEL [option ...]    # router, router.front, or a worker.
    python -P -m deploy.containers.container join MODEL [option ...]       # baton join.

MODEL is the value of BATON_MODEL. Compose mounts the directory of this name; if empty, MODEL is a Hub id. The model
then lies in the cache, filled by the first command above. A worker is named after its container. The options in the
environment variable OVERLAY_FLAGS come last, so an overlay of the compose file need not repeat the others.
"""

import contextlib
import os
import secrets
import shlex
import sys
import tempfile
from pathlib import Path

from common.base.errors import ConfigError
from deploy.operate.healthcheck import worker_here
from deploy.serve.model_source import HubName, cached_gguf, find_model, hub_directory, hub_name, model_in, served_name

MOUNT = Path("/model")
WORKERS = ("prefill_worker", "decode_worker")


def main(argv: list[str]) -> int:
    """Become the program, or return the exit status: 0, or 2 for a wrong command line or a missing model."""
    if len(argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    program, model, *flags = argv
    if program == "secret":
        make_secret(Path(model))
        return 0
    try:
        if program == "model":
            path = downloaded(model)
            print(f"{model} is in {path}", flush=True)
            return 0
        command = command_of(program, model, [*flags, *shlex.split(os.environ.get("OVERLAY_FLAGS", ""))])
    except ConfigError as error:
        print(f"BATON_MODEL = {model}: {error}", file=sys.stderr)
        return 2
    os.execv(sys.executable, [sys.executable, "-P", "-m", *command])


def make_secret(path: Path) -> None:
    """Write a secret readable by this user only, entirely or not at all; keep an existing secret."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent) as file, contextlib.suppress(FileExistsError):
        file.write(f"{secrets.token_hex(32)}\n")
        file.flush()
        os.link(file.name, path)


def command_of(program: str, model: str, flags: list[str]) -> list[str]:
    """Return the program and its options; options of the caller come last, and win."""
    name = [f"--worker-id={worker_here(program.removesuffix('_worker'))}"] if program in WORKERS else []
    path = found(model)
    called = served_name(Path(model)) if path.is_relative_to(MOUNT) else served_name(path, model)
    if program == "join":
        return ["deploy", program, str(path), "--model-name", called, *flags]
    return [program, *name, "--model-path", str(path), "--model-name", called, *flags]


def downloaded(model: str) -> Path:
    """Return the model directory as `found` does, but download a missing model from the Hub."""
    return find_model(model) if _on_hub(model) else found(model)


def found(model: str) -> Path:
    """Return the directory or the GGUF file of the model in this container; raises ConfigError."""
    name = _on_hub(model)
    if name is None:
        return model_in(MOUNT)
    repository = hub_directory(name.repository)
    if not repository.is_dir():
        raise ConfigError(f"it is not in the cache ({repository}); the service `model` downloads it")
    return cached_gguf(repository, name) if name.file else model_in(repository)


def _on_hub(model: str) -> HubName | None:
    """Return the parts of a name of the Hub; None for a mounted directory. Raises ConfigError for neither."""
    if MOUNT.is_dir() and any(MOUNT.iterdir()):
        return None
    if (name := hub_name(model)) is None:
        raise ConfigError(
            "it is empty, or not there, and no Hub id of the form owner/name; a relative path begins at the directory "
            "of compose.yaml"
        )
    return name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
