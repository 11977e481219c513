"""Kernels compiled without a GPU are those that a worker looks for, and a file of others costs a start nothing."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from triton import knobs
from triton.backends.compiler import GPUTarget

from common.base.errors import ConfigError
from common.device.steps.kernel_file import (
    MAGIC,
    _differences,
    conditions,
    platform_here,
    read_kernels,
    unpack,
)

ROOT = Path(__file__).parents[3]
KERNELS = ["_embedding_kernel", "_update_rows_kernel"]
REFUSED = "kernels are compiled here, because "

pytestmark = [pytest.mark.medium, pytest.mark.timeout(1800)]


class Programs:
    """Processes that compile kernels or find them; torch and Triton are imported once for all."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.device.ahead.few_kernels"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, what: str, path: Path, capability: str, model: str = "", *, cache: Path, **environ: str) -> str:
        """Return what one prints."""
        arguments = (what, str(path), capability, model)
        assert self._process.stdin and self._process.stdout
        print(
            json.dumps([{"TRITON_CACHE_DIR": str(cache), **environ}, arguments]), file=self._process.stdin, flush=True
        )
        said = ""
        while not (line := self._process.stdout.readline()).startswith("status "):
            assert line, "it has ended: see its output"
            said += line
        assert line == "status 0\n", "see what it printed"
        return said

    def found(self, path: Path, capability: str, cache: Path, model: str = "", **environ: str) -> list[Any]:
        said: list[Any] = json.loads(self.run("find", path, capability, model, cache=cache, **environ))
        return said

    def close(self) -> None:
        self._process.communicate()


def written(rest: bytes) -> bytes:
    return MAGIC + hashlib.sha256(rest).digest() + rest


@pytest.fixture(scope="module")
def programs() -> Iterator[Programs]:
    with closing(Programs()) as programs:
        yield programs


@pytest.fixture(scope="module")
def kernels(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    path = folder / "kernels"
    programs.run("write", path, "9.0", cache=folder / "cache")
    return path


def test_a_process_with_the_file_compiles_nothing_and_one_without_it_the_same(
    programs: Programs, kernels: Path, tmp_path: Path
) -> None:
    assert programs.found(kernels, "9.0", tmp_path / "with") == [[], KERNELS, [], []]
    [warning], on_disk, compiled, built = programs.found(tmp_path / "missing", "9.0", tmp_path / "without")
    assert (on_disk, compiled) == ([], KERNELS)
    assert "cuda_utils" in built and warning == f"{REFUSED}{tmp_path / 'missing'}: No such file or directory"
    keys = {name: {path.name for path in (tmp_path / name).glob("?" * 52)} for name in ("with", "without")}
    contents = read_kernels(kernels)
    assert len(contents.extensions) == len(built)
    in_file = {kernel.key for kernel in contents.kernels} | {extension.key for extension in contents.extensions}
    assert keys["with"] == keys["without"] == in_file


@pytest.mark.parametrize("name", platform_here())
def test_extensions_of_another_python_are_refused_by_name(
    kernels: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are the same for each Python, and code for a processor is never loaded where it may not belong."""
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "cache"))
    whole, path, here = read_kernels(kernels), tmp_path / "kernels", platform_here()[name]
    other = whole._replace(platform=whole.platform | {name: "another"})
    path.write_bytes(written(msgspec.msgpack.encode(other)))
    unpacked = unpack(path, GPUTarget("cuda", 90, 32))
    assert unpacked == (len(whole.kernels), 0, f"{name} another (here {here})")
    found = {each.parent.name for each in (tmp_path / "cache").glob("*/*.*")}
    assert found == {kernel.key for kernel in whole.kernels} and not list((tmp_path / "cache").rglob("*.so"))
    assert unpack(kernels, GPUTarget("cuda", 90, 32)) == (len(whole.kernels), len(whole.extensions), "")
    [extension] = [each for each in whole.extensions if each.name.startswith("cuda_utils")]
    assert (tmp_path / "cache" / extension.key / extension.name).read_bytes() == extension.content


def test_a_file_with_the_name_of_a_place_elsewhere_is_refused(kernels: Path, tmp_path: Path) -> None:
    whole, path = read_kernels(kernels), tmp_path / "kernels"
    kernel, extension = whole.kernels[0], whole.extensions[0]
    for wrong in (
        whole._replace(kernels=[kernel._replace(key="../x")]),
        whole._replace(kernels=[kernel._replace(name="../x")]),
        whole._replace(extensions=[extension._replace(key="/x")]),
        whole._replace(extensions=[extension._replace(name="../x.so")]),
    ):
        path.write_bytes(written(msgspec.msgpack.encode(wrong)))
        with pytest.raises(ConfigError, match="matching regex"):
            read_kernels(path)


def test_without_a_c_compiler_kernels_are_compiled_all_the_same(programs: Programs, tmp_path: Path) -> None:
    path, bin_dir = tmp_path / "kernels", tmp_path / "bin"
    bin_dir.mkdir()
    programs.run("write", path, "9.0", cache=tmp_path / "cache", PATH=str(bin_dir), CC="")
    contents = read_kernels(path)
    assert sorted(each.name for each in contents.kernels) == KERNELS and contents.extensions == []


def test_another_capability_or_environment_is_named_and_compiled(
    programs: Programs, kernels: Path, tmp_path: Path
) -> None:
    said = programs.found(kernels, "8.9", tmp_path / "8.9")
    assert said[:3] == [[f"{REFUSED}{kernels} was made for capability 9.0 (here 8.9)"], [], KERNELS]
    [warning], on_disk, compiled, _ = programs.found(kernels, "9.0", tmp_path / "other", DISABLE_PTXAS_OPT="1")
    assert "compiler's environment" in warning and "(here " in warning
    assert (on_disk, compiled) == ([], KERNELS)


def test_a_file_that_is_cut_changed_or_another_is_refused(programs: Programs, kernels: Path, tmp_path: Path) -> None:
    content = kernels.read_bytes()
    middle = len(content) // 2
    changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    for number, wrong in enumerate((b"", b"text", MAGIC, content[:-1], content[:60], changed, content + b"x")):
        path = tmp_path / str(number)
        path.write_bytes(wrong)
        with pytest.raises(ConfigError, match=r"is no file of kernels|is cut or was changed"):
            read_kernels(path)
    assert programs.found(tmp_path / "5", "9.0", tmp_path / "cache")[1:3] == [[], KERNELS]


def test_each_difference_of_conditions_is_named() -> None:
    here = conditions({"9.0": GPUTarget("cuda", 90, 32)})
    assert _differences(here, here) == []
    made = here | {
        "Triton": "3.0.0",
        "sources of the kernels": "0",
        "Triton's files": "0",
        "capabilities": {"9.0": "0"},
    }
    assert _differences(made, here) == [
        "other sources of the kernels",
        f"Triton 3.0.0 (here {here['Triton']})",
        "other Triton's files",
        "another ptxas",
    ]


@pytest.mark.gpu_types
def test_all_kernels_of_a_worker_are_in_its_file(programs: Programs, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(ROOT / "benchmarks" / "published" / "qwen3-4b.json", model / "config.json")
    path = tmp_path / "kernels"
    programs.run("write", path, "9.0", str(model), cache=tmp_path / "first")
    warnings, on_disk, compiled, built = programs.found(path, "9.0", tmp_path / "second", str(model))
    assert (warnings, compiled, built) == ([], [], [])
    assert len(on_disk) > 80
