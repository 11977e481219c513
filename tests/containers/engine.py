"""A container engine for tests: its commands, a copy of the tree to build from, and a base image where none is had."""

import contextlib
import functools
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).parents[2]
BASE = "python:3.12-slim"
BRIDGE = "docker0"
UNUSED = (
    "usr/share/python-wheels",
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "var/lib/apt/lists",
    "var/cache/apt/archives",
)
"""Of a bootstrapped system: what the official image does not have either."""
NOT_OF_PYTHON_3_12 = ("setuptools*", "wheel*", "pkg_resources", "_distutils_hack", "distutils-precedence.pth")


def run(*command: str, timeout_s: float = 1800.0, cwd: Path = ROOT) -> str:
    """What it prints, both ways; raises RuntimeError with that when it fails."""
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


def copied_tree(directory: Path) -> None:
    """Tracked files, so that a build may be tried with another edit."""
    for name in run("git", "ls-files").splitlines():
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)


def ensure_base(work: Path) -> str:
    """Have an image of the base's name; says which. Where it is not there and cannot be pulled Debian stands in for it.

    It is Debian's own Python then, not 3.12, with the pip settings and certificates of this machine.
    """
    if run("docker", "images", "-q", BASE).strip():
        return f"{BASE}, as it was here"
    with contextlib.suppress(RuntimeError):
        run("docker", "pull", BASE)
        return f"{BASE}, pulled"
    root = work / "base"
    packages = "python3,python3-venv,python3-pip,ca-certificates"
    run("debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(root))
    for name in UNUSED:
        shutil.rmtree(root / name, ignore_errors=True)
        (root / name).mkdir()
    for pattern in NOT_OF_PYTHON_3_12:
        for path in (root / "usr/lib/python3/dist-packages").glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (root / "usr/bin/python").symlink_to("python3")
    (root / "var/cache/apt/archives/partial").mkdir()
    for settings in ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt"):
        if Path(settings).exists():
            shutil.copy(settings, f"{root}{settings}")
    with open(root / "etc/pip.conf", "a") as pip:
        pip.write(f"\n[install]\ntrusted-host = {bridge_address()}\n")
    archive = work / "base.tar"
    run("tar", "-C", str(root), "-cf", str(archive), ".")
    run("docker", "import", "-c", "ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", str(archive), BASE)
    archive.unlink()
    version = run("docker", "run", "--rm", BASE, "python", "--version").strip()
    return f"Debian's minimal system under the name {BASE}, with {version}"


def bridge_address() -> str:
    """Of this machine, as containers that are built see it."""
    found = run("docker", "network", "inspect", "bridge", "-f", "{{(index .IPAM.Config 0).Gateway}}").strip()
    return found or run("ip", "-4", "-o", "addr", "show", BRIDGE).split()[3].partition("/")[0]


@contextlib.contextmanager
def torch_index(wheels: Path, work: Path) -> Iterator[str]:
    """A package index of torch's wheels in a directory; yields its address."""
    directory = work / "index" / "torch"
    directory.mkdir(parents=True)
    names = [path.name for path in wheels.glob("torch-*.whl")]
    for name in names:
        (directory / name).symlink_to(wheels / name)
    (directory / "index.html").write_text("".join(f'<a href="{name}">{name}</a>\n' for name in names))
    handler = functools.partial(_Quiet, directory=str(directory.parent))
    with ThreadingHTTPServer((bridge_address(), 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{bridge_address()}:{server.server_port}/"
        server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def image_bytes(names: Sequence[str]) -> dict[str, int]:
    """How large images are."""
    return {name: int(run("docker", "image", "inspect", "-f", "{{.Size}}", name)) for name in names}
