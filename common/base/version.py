"""The version of Baton: the package's release and the commit that was built or is checked out."""

from importlib import metadata
from pathlib import Path

RELEASE = "0.1.0"
COMMIT_CHARS = 9


def commit_of(root: Path) -> str:
    """Return the first characters of a checkout's commit; empty where `root` is no checkout."""
    try:
        git = root / ".git"
        if git.is_file():  # a worktree, whose branches are in the repository
            git = root / git.read_text().partition(":")[2].strip()
        head = (git / "HEAD").read_text().strip()
        return (_resolved(git, head.removeprefix("ref: ")) if head.startswith("ref: ") else head)[:COMMIT_CHARS]
    except OSError:
        return ""


def _resolved(git: Path, ref: str) -> str:
    common = git / (git / "commondir").read_text().strip() if (git / "commondir").is_file() else git
    if (common / ref).is_file():
        return (common / ref).read_text().strip()
    packed = [line.split() for line in (common / "packed-refs").read_text().splitlines()]
    return next((commit for commit, *name in packed if name == [ref]), "")


def _version() -> str:
    """Ask the checkout of this file, else the installed package; an editable package is as old as its install."""
    if commit := commit_of(Path(__file__).parents[2]):
        return f"{RELEASE}+g{commit}"
    try:
        installed = metadata.version("baton")
    except metadata.PackageNotFoundError:
        return RELEASE
    return installed if installed.partition("+")[0] == RELEASE else RELEASE


VERSION = _version()
