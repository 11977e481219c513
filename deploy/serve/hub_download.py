"""Download of a model from the Hugging Face Hub, with progress, or a failure reason in a line."""

import contextlib
import errno
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError comes from an HTTP library that varies
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils.tqdm import disable_progress_bars

from common.base.errors import ConfigError

WANTED = ["*.json", "*.safetensors", "tokenizer*", "chat_template.jinja", "merges.txt", "vocab.txt"]
UNWANTED = ["original/*", "consolidated*", "*/*"]  # copies of the weights in other layouts
PROGRESS_S = 5.0
"""Seconds between two progress lines."""
LOG_IN = "run `hf auth login` or set HF_TOKEN"
MAKE_ROOM = "make room there, or name another directory with HF_HUB_CACHE"
GB = 1e9


def download(hub_id: str, repository: Path) -> Path:
    """Return the directory of a complete snapshot of a model; only missing files are downloaded.

    Args:
        repository: the model's directory in the Hub's cache.

    Raises ConfigError, also without an answer after HF_HUB_ETAG_TIMEOUT (10) seconds.
    """
    api = HfApi()
    try:
        silent, missing = None, _missing_bytes(api, hub_id, repository)
    except (HTTPError, OSError) as error:
        silent, missing = error, 0
    _check_room(hub_id, missing, repository)
    try:
        with _progress_shown(hub_id, missing, repository), _ended_by_signals(repository):
            return Path(
                api.snapshot_download(
                    hub_id, allow_patterns=WANTED, ignore_patterns=UNWANTED, local_files_only=silent is not None
                )
            )
    except LocalEntryNotFoundError as error:
        raise ConfigError(_why(hub_id, silent or error.__cause__ or error, repository, api.endpoint)) from None
    except (HTTPError, OSError, ValueError) as error:
        raise ConfigError(_why(hub_id, error, repository)) from None


def _why(hub_id: str, cause: BaseException, repository: Path, silent: str = "") -> str:
    """Return the problem and a remedy; `silent` is the endpoint if there was no answer at all."""
    if isinstance(cause, GatedRepoError):
        return f"{hub_id} is gated: accept its licence on the Hub, then {LOG_IN}"
    if isinstance(cause, RepositoryNotFoundError):
        return f"the Hub has no model {hub_id!r}, or it is private: check the name, or {LOG_IN}"
    said = str(cause).partition("\n")[0] or type(cause).__name__
    if isinstance(cause, HfHubHTTPError) and cause.response.status_code in (401, 403):
        return f"the Hub refuses {hub_id}: {said}; {LOG_IN}"
    if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
        return f"cannot download {hub_id}: {said}; {repository} is full: {MAKE_ROOM}"
    if silent:
        return (
            f"{hub_id} is not in the local cache, or not all of it, and {silent} does not give it: {said}; check the "
            "network and HF_ENDPOINT, or try again later"
        )
    return f"cannot download {hub_id}: {said}; files that are complete stay there: start again"


def _missing_bytes(api: HfApi, hub_id: str, repository: Path) -> int:
    """Return the bytes to download; 0 if the Hub does not tell sizes.

    Asked first, because `snapshot_download` waits without limit for its first answer.
    """
    try:
        files = api.model_info(hub_id, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT).siblings or ()
    except HfHubHTTPError:
        return 0  # the download meets the problem again
    missing = 0
    for file in files:
        blob = file.lfs.sha256 if file.lfs else file.blob_id
        if _is_wanted(file.rfilename) and not (blob and (repository / "blobs" / blob).exists()):
            missing += file.size or 0
    return missing


def _is_wanted(name: str) -> bool:
    return any(fnmatch(name, each) for each in WANTED) and not any(fnmatch(name, each) for each in UNWANTED)


def _check_room(hub_id: str, missing: int, repository: Path) -> None:
    directory = _first_there(repository)
    free = shutil.disk_usage(directory).free
    if missing > free:
        raise ConfigError(
            f"{hub_id} takes {missing / GB:.2f} GB more, and {directory} has {free / GB:.2f} GB left: {MAKE_ROOM}"
        )


def _first_there(path: Path) -> Path:
    return path if path.is_dir() else _first_there(path.parent)


@contextlib.contextmanager
def _progress_shown(hub_id: str, missing: int, repository: Path) -> Iterator[None]:
    """Print the progress of a download now and then; on a terminal the Hub's own bars do."""
    is_over, begin_s, before = threading.Event(), time.monotonic(), _size(repository)
    of = f"of {missing / GB:.2f} " if missing else ""

    def say() -> None:
        while not is_over.wait(PROGRESS_S):
            there, passed_s = _size(repository) - before, time.monotonic() - begin_s
            print(f"{hub_id}: {there / GB:.2f} {of}GB are there after {passed_s:.0f} s", flush=True)

    if sys.stderr.isatty():
        yield
        return
    disable_progress_bars()
    progress = threading.Thread(target=say, name="progress", daemon=True)
    progress.start()
    try:
        yield
    finally:
        is_over.set()
        progress.join()  # no progress line after the end


@contextlib.contextmanager
def _ended_by_signals(repository: Path) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the process at once, and remove useless partial files.

    The library's threads would first finish their files, even for hours.
    """
    others = _pieces(repository)

    def end(number: int, _frame: object) -> None:
        for piece in _pieces(repository) - others:
            piece.unlink(missing_ok=True)
        os._exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _pieces(repository: Path) -> set[Path]:
    return set(repository.glob("blobs/*.incomplete"))


def _size(repository: Path) -> int:
    """Return the bytes of a model's directory in a Hugging Face cache, incomplete files included."""
    total = 0
    for path in repository.glob("blobs/*"):
        with contextlib.suppress(FileNotFoundError):  # just renamed
            total += path.stat().st_size
    return total
