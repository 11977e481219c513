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
TESTS = ROOT / "tests"
SOURCES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]

# Rooms of each package from top to bottom: a file imports its own room and rooms below it. A file that stands beside
# the rooms is a room by itself; `__main__` and `worker` may import all.
ROOMS_OF = {
    "router": (
        "front", "program", "api", "answers", "service", "sessions", "http_service", "http", "reading", "observe",
        "workers", "dispatch", "dispatch.completion", "requests", "grammar", "text", "text.formats", "placement",
        "base",
    ),
    "decode_worker": (
        "inbox", "steps", "outputs", "cancellation", "grammar_masks", "admission", "arrivals", "batch", "sequences",
    ),
    "common": (
        "serving.worker", "serving.prompts", "serving.turns", "device.ahead", "device.steps", "device.engine",
        "models.families", "models", "models.loading", "models.layers", "models.gguf", "models.quantization.configs",
        "models.quantization", "models.sizes", "ops", "ops.reference", "ops.base", "kv",
        "memory", "memory.server", "memory.gates", "memory.host_tier", "memory.blocks", "memory.devices",
        "memory.client", "memory.base",
        "kernels.latent", "kernels.attention.hopper", "kernels.attention", "kernels.delta", "kernels.experts",
        "kernels.products", "kernels.products.tiles", "kernels.sampling", "kernels.elementwise", "kernels.base",
        "grammar", "wire.transport", "wire.messages", "wire.values", "settings", "checkpoint", "checkpoint.gguf",
        "base",
    ),
    "deploy": (
        "cli", "bench", "containers", "serve", "autoscale", "planning", "planning.simulation", "planning.step_times",
        "trace", "processes", "operate", "demo_model",
    ),
}  # fmt: skip
TOP = {"__main__", "worker"}
# Beside what it stands on (`base`, `settings`), a part of `common` imports these parts alone; kernels import kernels.
PARTS_BELOW = {
    "checkpoint": set[str](),
    "wire": {"checkpoint"},
    "grammar": {"wire", "checkpoint"},
    "kernels": set[str](),
    "ops": {"kernels"},
    "models": {"wire", "checkpoint", "ops"},
    "memory": {"wire"},
    "kv": {"wire", "kernels", "memory"},
    "device": {"wire", "kernels", "ops", "models", "kv", "memory"},
    "serving": {"wire", "checkpoint", "models", "grammar", "device", "memory", "kv"},
}
GROUND = {"base", "settings"}
MAX_FILES = 16
FAMILIES = ROOT / "common" / "models" / "families"  # a file for each `model_type`, however many there are
PAGES = [
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/**/*.md", "deploy/**/*.md", "benchmarks/*.md", "tests/*/README.md")
    for path in sorted(ROOT.glob(pattern))
]
NAMING_FILES = [page for page in PAGES if page.parts[0] in ("README.md", "ARCHITECTURE.md", "benchmarks", "docs")]

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
    "router.front.__main__": {"torch", "triton", "safetensors", "transformers", "deploy", "opentelemetry"},
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
    "router.grammar.grammar_main": {
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
    "deploy.cli": {"torch", "triton", "safetensors", "transformers", "router", "prefill_worker", "decode_worker"},
    "deploy.planning.simulation.simulator": {
        "torch",
        "triton",
        "aiohttp",
        "tokenizers",
        "zmq",
        "prefill_worker",
        "decode_worker",
    },
    "prefill_worker.__main__": {
        "triton",
        "llguidance",
        "aiohttp",
        "tokenizers",
        "transformers",
        "router",
        "decode_worker",
        "deploy",
    },
    "decode_worker.__main__": {
        "triton",
        "llguidance",
        "aiohttp",
        "tokenizers",
        "transformers",
        "router",
        "prefill_worker",
        "deploy",
    },
    "common.serving.prompts.scheduler": {"torch", "triton"},
    "decode_worker.sequences.scheduler": {"torch", "triton"},
    "common.grammar.followers": {"torch", "triton", "aiohttp", "tokenizers", "llguidance"},
    "common.grammar.follower_server": {"torch", "triton", "numpy", "aiohttp", "tokenizers", "zmq"},
    "common.grammar.grammars": {"torch", "triton", "aiohttp", "tokenizers"},
    "common.serving.prompts.order": {"torch", "triton"},
    "common.serving.turns.law": {"torch", "triton", "zmq"},
    "common.wire.transport.sockets": {"torch", "triton", "aiohttp", "tokenizers"},
    "common.wire.transport.router_link": {"torch", "triton", "aiohttp", "tokenizers"},
    "benchmarks.router_streams": {"torch", "triton", "safetensors"},  # for each of its processes, with fakes
}
WITHOUT_EXTRAS = (
    "router.__main__", "router.front.__main__",
    "router.reading.reader_main", "router.reading.template_main", "router.grammar.grammar_main",
    "common.memory.__main__", "deploy.cli", "deploy.operate.healthcheck",
)  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("module", FORBIDDEN)
def test_a_room_loads_only_what_it_may(module: str) -> None:
    assert not _loaded_by(module) & FORBIDDEN[module]


@pytest.mark.parametrize("module", WITHOUT_EXTRAS)
def test_a_program_of_the_router_s_image_needs_no_extra(module: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    worker = {re.split(r"[^\w-]", requirement)[0] for requirement in extras["worker"]}
    assert "torch" in worker
    assert not _loaded_by(module) & worker


@pytest.mark.medium
@pytest.mark.parametrize("package", ROOMS_OF)
def test_imports_go_down(package: str) -> None:
    rooms = ROOMS_OF[package]
    upward = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.stem != "__init__" and (importer := _room_of(path, package)) not in TOP
        for name in _imports(path, package)
        if rooms.index(_room(name, package)) < rooms.index(importer)
    ]
    assert not upward, "\n".join(upward)


@pytest.mark.medium
@pytest.mark.parametrize("part", PARTS_BELOW)
def test_a_part_of_common_imports_only_parts_below_it(part: str) -> None:
    allowed = PARTS_BELOW[part] | {part} | (GROUND if part != "kernels" else set())
    for path in sorted((ROOT / "common" / part).rglob("*.py")):
        for name in _imports(path, "common"):
            assert name.split(".")[1] in allowed, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("package", [*ROOMS_OF, "prefill_worker"])
def test_rooms_are_small(package: str) -> None:
    for folder in sorted({path.parent for path in (ROOT / package).rglob("*.py")} - {FAMILIES}):
        files = list(folder.glob("*.py"))
        assert len(files) <= MAX_FILES, f"{len(files)} files in {folder.relative_to(ROOT)}: make two rooms of it"


def test_tests_mirror_the_rooms() -> None:
    for folder in sorted({path.parent for path in TESTS.rglob("test_*.py")} - {TESTS}):
        mirrored = ROOT if folder.relative_to(TESTS).parts[0] in ROOMS else ROOT / "common"
        if not (mirrored / folder.relative_to(TESTS).parts[0]).is_dir():
            continue  # of no package: whole systems, clients, containers
        has_own_fixtures = (folder / "conftest.py").exists()
        assert (mirrored / folder.relative_to(TESTS)).is_dir() or has_own_fixtures, f"no room is like {folder}"
        files = list(folder.glob("test_*.py"))
        assert len(files) <= MAX_FILES, f"{len(files)} files of tests in {folder}"


@cache
def _loaded_by(module: str) -> set[str]:
    """The top-level names of all modules that importing it loads."""
    code = f"import sys, {module}; print('\\n'.join(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=200
    )
    return {name.split(".")[0] for name in loaded.stdout.split()}


def _imports(path: Path, package: str) -> Iterator[str]:
    """Yield the modules of a package that a file imports, `package.` included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == package:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if _is_module(name) else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == package)


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def _room(name: str, package: str) -> str:
    """Return the room that a module of a package is in."""
    path = ROOT.joinpath(*name.split("."))
    return _room_of(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"), package)


def _room_of(path: Path, package: str) -> str:
    inside = path.relative_to(ROOT / package)
    return ".".join(inside.parts[:-1]) or inside.stem


@pytest.mark.medium
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_small_and_say_why_they_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    limit = 400 if "kernels" in path.parts else 350
    assert text.count("\n") <= limit, f"{path.name}: split it"
    assert ast.get_docstring(ast.parse(text)), "a module docstring says why the module exists"
    assert not re.search(r"class \w+Mixin\b", text)
    if "deploy" not in path.parts and path.name != "options.py":
        assert "os.environ" not in text and "getenv" not in text, "settings come from common.settings.config"


@pytest.mark.parametrize("page", NAMING_FILES, ids=str)
def test_pages_name_only_files_that_exist(page: Path) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|md|toml|csv|yaml|txt|html|js|service))`", text):
        assert (ROOT / name).exists(), f"{page} names {name}"
    for module in re.findall(rf"python -m ((?:{'|'.join(ROOMS)})[\w.]*)", text):
        path = ROOT.joinpath(*module.strip(".").split("."))
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{page} runs {module}"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = ROOT / page.parent / path if path else ROOT / page
        if not link.startswith("http"):
            assert target.exists(), f"{page} links to {link}"
            assert not anchor or anchor in _anchors(target.resolve()), f"{page} links to {link}"


@cache
def _anchors(page: Path) -> set[str]:
    """Return the anchors that a renderer makes of a page's headings, or of the lines of another file."""
    if page.suffix != ".md":
        return {f"L{number}" for number in range(1, page.read_bytes().count(b"\n") + 1)}
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"(?m)^#+ (.*)$", text)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
