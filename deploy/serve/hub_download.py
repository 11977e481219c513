"""Download of a model from the Hugging Face Hub, with progress, or a failure reason in a line."""

import contextlib
import errno
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError comes from an HTTP library that varies
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils.tqdm import disable_progress_bars

from common.base.errors import ConfigError
from common.checkpoint.gguf.model_file import parts_of
from deploy.serve.gguf_choice import chosen, models_among, parts_named, which_one
from deploy.serve.model_source import names_in

WANTED = ["*.json", "*.safetensors", "tokenizer*", "chat_template.jinja", "merges.txt", "vocab.txt"]
UNWANTED = ["original/*", "consolidated*", "*/*"]  # copies of the weights in other layouts
PROGRESS_S = 5.0
"""Seconds between two progress lines."""
LOG_IN = "run `hf auth login` or set HF_TOKEN"
MAKE_ROOM = "make room there, or name another directory with HF_HUB_CACHE"
GB = 1e9


class Listing(NamedTuple):
    """Files of a repository, or the problem that the Hub did not tell them with."""

    files: Sequence[RepoSibling] = ()
    problem: BaseException | None = None
    is_silent: bool = False  # there was no answer at all

    @property
    def names(self) -> list[str]:
        return [file.rfilename for file in self.files]

    def missing_bytes(self, repository: Path, patterns: Sequence[str]) -> int:
        """Return the bytes to download; 0 if the Hub does not tell sizes."""
        missing = 0
        for file in self.files:
            blob = file.lfs.sha256 if file.lfs else file.blob_id
            if _is_wanted(file.rfilename, patterns) and not (blob and (repository / "blobs" / blob).exists()):
                missing += file.size or 0
        return missing


def download(hub_id: str, repository: Path) -> Path:
    """Return the directory of a complete snapshot of a model; only missing files are downloaded.

    Args:
        repository: the model's directory in the Hub's cache.

    Raises ConfigError, also without an answer after HF_HUB_ETAG_TIMEOUT (10) seconds.
    """
    api = HfApi()
    listing = _listing(api, hub_id)
    if models_among(listing.names) and not any(_is_wanted(name, ["*.safetensors"]) for name in listing.names):
        raise ConfigError(f"{hub_id} has its model in GGUF; {which_one(models_among(listing.names), hub_id)}")
    return _snapshot(api, hub_id, repository, listing, WANTED)


def download_gguf(hub_id: str, wanted: str, repository: Path) -> Path:
    """Return the GGUF file of a repository that `wanted` names, of several parts the first; see `download`.

    Args:
        wanted: the name of the file, or the end of the name such as Q4_K_M.
    """
    api = HfApi()
    listing = _listing(api, hub_id)
    names = listing.names or names_in(repository)
    if listing.problem is not None and not names:
        raise ConfigError(_why(hub_id, listing.problem, repository, api.endpoint if listing.is_silent else ""))
    name = chosen(names, wanted, hub_id)
    path = _snapshot(api, hub_id, repository, listing, parts_named(name)) / name
    if not all(part.is_file() for part in parts_of(path)):
        raise ConfigError(f"{path} is not there; start again when the Hub can be reached")
    return path


def _snapshot(api: HfApi, hub_id: str, repository: Path, listing: Listing, patterns: Sequence[str]) -> Path:
    """Return the directory of a snapshot with all files of some patterns."""
    missing = listing.missing_bytes(repository, patterns)
    _check_room(hub_id, missing, repository)
    unwanted = UNWANTED if patterns is WANTED else None
    try:
        with _progress_shown(hub_id, missing, repository), _ended_by_signals(repository):
            return Path(
                api.snapshot_download(
                    hub_id,
                    allow_patterns=[*patterns],
                    ignore_patterns=unwanted,
                    local_files_only=listing.is_silent,
                )
            )
    except LocalEntryNotFoundError as error:
        cause = (listing.problem if listing.is_silent else None) or error.__cause__ or error
        raise ConfigError(_why(hub_id, cause, repository, api.endpoint)) from None
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


def _listing(api: HfApi, hub_id: str) -> Listing:
    """Ask for the files; first of all, because `snapshot_download` waits without limit for its first answer."""
    try:
        found = api.model_info(hub_id, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except HfHubHTTPError as error:
        return Listing(problem=error)  # the download meets it again
    except (HTTPError, OSError) as error:
        return Listing(problem=error, is_silent=True)
    return Listing(found.siblings or ())


def _is_wanted(name: str, patterns: Sequence[str]) -> bool:
    is_refused = patterns is WANTED and any(fnmatch(name, each) for each in UNWANTED)
    return not is_refused and any(fnmatch(name, each) for each in patterns)


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
