"""Who may know whom, by what is really loaded; and the habits that keep the tree readable."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("router", "prefill_worker", "decode_worker", "common", "deploy", "benchmarks")
SOURCES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]

# What each room of `common` may import of `common`, beside itself. Loose files (errors, log, config, options, dtypes,
# version, json_file) are the ground that all rooms stand on.
ROOMS_BELOW = {
    "wire": set[str](),
    "grammar": {"wire"},
    "kernels": set[str](),
    "ops": {"kernels"},
    "models": {"ops"},
    "memory": {"wire"},
    "kv": {"wire", "kernels", "memory"},
    "device": {"wire", "kernels", "ops", "models", "kv", "memory"},
    "serving": {"wire", "device", "memory", "kv"},
}

FORBIDDEN = {
    "router.__main__": {
        "torch",
        "triton",
        "safetensors",
        "transformers",
        "prefill_worker",
        "decode_worker",
        "deploy",
        "opentelemetry",
    },
    "router.reading.reader_main": {"torch", "triton", "safetensors", "transformers", "aiohttp", "zmq"},
    "router.reading.template_main": {
        "torch",
        "triton",
        "safetensors",
        "transformers",
        "tokenizers",
        "numpy",
        "aiohttp",
        "zmq",
    },
    "router.grammar.compiler": {
        "torch",
        "triton",
        "safetensors",
        "transformers",
        "tokenizers",
        "numpy",
        "asyncio",
        "aiohttp",
        "zmq",
    },
    "common.memory.__main__": {"torch", "triton", "aiohttp", "tokenizers", "safetensors"},
    "deploy.cli": {"torch", "triton", "safetensors", "transformers", "prefill_worker", "decode_worker"},
    "deploy.planning.simulator": {
        "torch",
        "triton",
        "numpy",
        "aiohttp",
        "tokenizers",
        "zmq",
        "prefill_worker",
        "router",
    },
    "prefill_worker.__main__": {
        "llguidance",
        "aiohttp",
        "tokenizers",
        "transformers",
        "router",
        "decode_worker",
        "deploy",
    },
    "decode_worker.__main__": {
        "llguidance",
        "aiohttp",
        "tokenizers",
        "transformers",
        "router",
        "prefill_worker",
        "deploy",
    },
    "prefill_worker.scheduler": {"torch", "triton"},
    "decode_worker.scheduler": {"torch", "triton"},
    "common.grammar.followers": {"torch", "triton", "aiohttp", "tokenizers", "llguidance"},
    "common.grammar.follower_server": {"torch", "triton", "numpy", "aiohttp", "tokenizers", "zmq"},
    "common.grammar.grammars": {"torch", "triton", "aiohttp", "tokenizers"},
    "common.serving.prompts.order": {"torch", "triton"},
    "common.wire.transport.sockets": {"torch", "triton", "aiohttp", "tokenizers"},
    "common.wire.transport.router_link": {"torch", "triton", "aiohttp", "tokenizers"},
}
WITHOUT_EXTRAS = (
    "router.__main__", "router.reading.reader_main", "router.reading.template_main", "router.grammar.compiler",
    "common.memory.__main__", "deploy.cli", "deploy.healthcheck",
)  # fmt: skip


@pytest.mark.parametrize("module", FORBIDDEN)
def test_a_room_loads_only_what_it_may(module: str) -> None:
    assert not _loaded_by(module) & FORBIDDEN[module]


@pytest.mark.parametrize("module", WITHOUT_EXTRAS)
def test_a_program_of_the_router_s_image_needs_no_extra(module: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    worker = {re.split(r"[^\w-]", requirement)[0] for requirement in extras["worker"]}
    assert "torch" in worker
    assert not _loaded_by(module) & worker


@pytest.mark.parametrize("room", ROOMS_BELOW)
def test_a_room_of_common_imports_only_rooms_below_it(room: str) -> None:
    below = ROOMS_BELOW[room] | {room}
    for path in sorted((ROOT / "common" / room).glob("*.py")):
        for name in _common_imports(path):
            child = name.split(".")[1]
            is_room = (ROOT / "common" / child).is_dir()
            assert not is_room or child in below, f"{path.name} of {room} imports {name}"
            assert is_room or room != "kernels", f"{path.name}: kernels import torch, triton and each other only"


def test_every_room_of_common_is_named() -> None:
    rooms = {path.parent.name for path in (ROOT / "common").glob("*/*.py")}
    assert rooms == set(ROOMS_BELOW)


@pytest.mark.parametrize("room", [*ROOMS[:4], "deploy/planning", *(f"common/{room}" for room in ROOMS_BELOW)])
def test_the_table_of_rooms_names_the_files_that_are_there(room: str) -> None:
    architecture = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `{room}/` \| (.*) \|$", architecture, re.MULTILINE)
    named = set(" ".join(re.findall("`(.*?)`", row)).split())
    files = {path.stem for path in (ROOT / room).glob("*.py") if not path.stem.startswith("__")}
    assert named <= files, f"{sorted(named - files)}: no files of {room}"
    assert named == files or " a file" in row, f"ARCHITECTURE.md says nothing of {sorted(files - named)} in {room}"


@cache
def _loaded_by(module: str) -> set[str]:
    """The top-level names of all modules that importing it loads."""
    code = f"import sys, {module}; print('\\n'.join(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=200
    )
    return {name.split(".")[0] for name in loaded.stdout.split()}


def _common_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("common."):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("common."))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_small_and_say_why_they_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    limit = 400 if "kernels" in path.parts else 350
    assert text.count("\n") <= limit, f"{path.name}: split it"
    assert ast.get_docstring(ast.parse(text)), "a module docstring says why the module exists"
    assert not re.search(r"class \w+Mixin\b", text)
    if "deploy" not in path.parts and path.name != "options.py":
        assert "os.environ" not in text and "getenv" not in text, "settings come from common.settings.config"


def test_the_readme_names_only_files_that_exist() -> None:
    for page in ("README.md", "ARCHITECTURE.md", "benchmarks/README.md"):
        for name in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|md|toml|csv|yaml|txt))`", (ROOT / page).read_text()):
            assert (ROOT / name).exists(), f"{page} names {name}"
