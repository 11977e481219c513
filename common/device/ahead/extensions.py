"""Extension modules in C that Triton builds beside kernels: its driver and, before 3.7, a launcher for each signature.

They are built without a GPU, and not loaded. At link time an empty library of the same name and symbols stands for the
driver's, which only a machine with a GPU has.
"""

import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from triton.backends.nvidia import driver as nvidia
from triton.runtime import build
from triton.runtime._async_compile import FutureKernel

from common.base.errors import ConfigError

LIBRARY = "libcuda.so.1"
FUNCTION = re.compile(r"\bcu[A-Z]\w*")


class Extension(NamedTuple):
    """An extension module as Triton asks for it."""

    name: str
    source: str


class Unloaded:
    """A module that is not loaded: each of its functions returns None."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def asked_for(kernels: Iterable[Any]) -> set[Extension]:
    """Return the extensions that a process builds, or finds, before it launches `kernels`; none is built or loaded.

    Changes Triton's driver in this process for good.

    Args:
        kernels: compiled, or being compiled, as Triton's `run` returns them.
    """
    asked: set[Extension] = set()

    def note(src: str, name: str, **_: object) -> Unloaded:
        asked.add(Extension(name, src))
        return Unloaded()

    vars(nvidia).update(library_dirs=list, compile_module_from_src=note)
    active = nvidia.triton.runtime.driver.active
    active.utils = nvidia.CudaUtils()
    for kernel in kernels:
        whole = kernel.result() if isinstance(kernel, FutureKernel) else kernel
        nvidia.CudaLauncher(whole.src, whole.metadata)
    return asked


def build_extensions(extensions: Iterable[Extension]) -> None:
    """Build extensions where Triton looks for them (`knobs.cache.dir`), without loading any.

    Raises ConfigError without a C compiler or Python's headers.
    """

    def built(extension: Extension) -> None:
        build.compile_module_from_src(
            src=extension.source,
            name=extension.name,
            library_dirs=[place],
            include_dirs=nvidia.include_dirs,
            libraries=[LIBRARY],
        )

    with TemporaryDirectory(prefix="baton-warm-") as place, _nothing_loaded():
        try:
            make_library(Path(place))
            with ThreadPoolExecutor(os.cpu_count() or 1) as compilers:
                for future in [compilers.submit(built, each) for each in sorted(extensions)]:
                    future.result()
        except (RuntimeError, OSError) as error:  # no compiler was found, or not the one of CC
            raise ConfigError(str(error)) from None
        except subprocess.CalledProcessError as error:
            command = error.cmd[0]
            raise ConfigError(f"{command} ended with status {error.returncode}; are Python's headers there?") from None


def make_library(directory: Path) -> None:
    """Make a library with the name and the functions of the driver's, which do nothing."""
    header, source = Path(nvidia.include_dirs[0]) / "cuda.h", directory / "driver.c"
    names = sorted(set(FUNCTION.findall(header.read_text(encoding="utf-8"))))
    source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in names), encoding="utf-8")
    library = build._build("driver", str(source), str(directory), [], [], [], ["-w", f"-Wl,-soname,{LIBRARY}"])
    os.replace(library, directory / LIBRARY)


@contextmanager
def _nothing_loaded() -> Iterator[None]:
    load = build._load_module_from_path
    build._load_module_from_path = lambda name, path: Unloaded()
    try:
        yield
    finally:
        build._load_module_from_path = load
