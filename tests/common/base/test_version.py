"""The version of what is running names its commit, however the source came here."""

import subprocess
import sys
from pathlib import Path

import pytest

from common.base.version import COMMIT_CHARS, RELEASE, VERSION, commit_of

ROOT = Path(__file__).parents[3]


def git(directory: Path, *words: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e@x", "-c", "init.defaultBranch=main")
    return subprocess.run(["git", *identity, *words], cwd=directory, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with a commit on a branch whose name has a slash."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    git(checkout, "init")
    git(checkout, "checkout", "-b", "some/branch")
    git(checkout, "commit", "--allow-empty", "-m", "one")
    return checkout


def test_the_commit_is_found_on_a_branch_packed_detached_and_in_a_worktree(checkout: Path, tmp_path: Path) -> None:
    first = git(checkout, "rev-parse", "HEAD")[:COMMIT_CHARS]
    assert commit_of(checkout) == first
    git(checkout, "worktree", "add", "-b", "other", str(tmp_path / "worktree"))
    git(tmp_path / "worktree", "commit", "--allow-empty", "-m", "two")
    second = git(tmp_path / "worktree", "rev-parse", "HEAD")[:COMMIT_CHARS]
    assert (commit_of(checkout), commit_of(tmp_path / "worktree")) == (first, second)
    git(checkout, "pack-refs", "--all")
    assert (commit_of(checkout), commit_of(tmp_path / "worktree")) == (first, second)
    git(checkout, "checkout", "--detach", "other")
    assert commit_of(checkout) == second


def test_where_there_is_no_checkout_or_no_commit_there_is_none(checkout: Path, tmp_path: Path) -> None:
    assert commit_of(tmp_path) == ""
    git(checkout, "checkout", "--orphan", "unborn")
    assert commit_of(checkout) == ""


def test_an_installed_package_has_the_version_that_it_was_built_with(tmp_path: Path) -> None:
    (tmp_path / "common" / "base").mkdir(parents=True)
    version = "common/base/version.py"
    (tmp_path / version).write_text((ROOT / version).read_text())
    (tmp_path / "baton-0.dist-info").mkdir()
    metadata = tmp_path / "baton-0.dist-info" / "METADATA"
    show = "import sys; sys.path.insert(0, '.'); import common.base.version; print(common.base.version.VERSION)"
    ask = [sys.executable, "-P", "-c", show]
    for built, expected in ((f"{RELEASE}+g123456789", f"{RELEASE}+g123456789"), ("0.0.1+g987654321", RELEASE)):
        metadata.write_text(f"Metadata-Version: 2.1\nName: baton\nVersion: {built}\n")
        shown = subprocess.run(ask, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()
        assert shown == expected


def test_this_version_begins_with_the_release() -> None:
    assert VERSION.partition("+")[0] == RELEASE
