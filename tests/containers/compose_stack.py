"""The CPU deployment of compose.yaml, built and used for real, by hand:

    .venv/bin/python -m tests.containers.compose_stack [--wheels DIR | --torch-index URL] [--keep]

Needs a container engine with Compose 2, and root if its base image has to be made. Builds the images from a copy of the
tracked files, twice, with an edit between; serves the openai client with 2 prefill and 3 decode workers; under load
scales to one of each and back, kills processes of workers and the memory server's, restarts each worker in turn and the
router, and starts all but the port anew with other settings; stops everything, and removes what it made. Ends with 1 if
a text was another than before, or a request failed: clients retry nothing.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.containers.engine import BASE, copied_tree, ensure_base, image_bytes, run, torch_index
from tests.containers.load import Load

PORT = 8913
URL = f"http://127.0.0.1:{PORT}"
IMAGES = ("baton-router:tested", "baton-worker-cpu:tested")
READY_S = 300.0
POOL_BYTES = 1 << 28
PROGRAMS = {"decode": "decode_worker", "prefill": "prefill_worker", "memory": "common.memory"}
"""Modules, by their services."""
SERVING = ("router", "prefill", "decode", "memory")
"""Services that a next deployment replaces: all but who holds the port."""
NUM_CLIENTS = 6
ANSWERS = 30
"""In each phase."""


class Stack:
    """A compose project of its own name, of files in a directory."""

    def __init__(self, tree: Path, index: str) -> None:
        self.tree = tree
        os.environ |= {
            "BATON_PORT": f"127.0.0.1:{PORT}", "BATON_TORCH_INDEX": index, "BATON_VERSION": "tested",
            "BATON_KV_BYTES": str(POOL_BYTES), "DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "plain",
        }  # fmt: skip

    def compose(self, *words: str) -> str:
        files = ("-f", str(self.tree / "deploy" / "compose.yaml"))
        return run("docker", "compose", "-p", "baton-tested", *files, *words)

    def build(self) -> tuple[float, str]:
        begin_s = time.monotonic()
        said = self.compose("build")
        return time.monotonic() - begin_s, said

    def scale(self, num_prefill: int, num_decode: int) -> None:
        """And wait until so many serve, and every path between them is proven."""
        os.environ |= {"BATON_PREFILL_REPLICAS": str(num_prefill), "BATON_DECODE_REPLICAS": str(num_decode)}
        self.compose("up", "-d")
        self.await_workers(num_prefill, num_decode)

    def await_workers(self, num_prefill: int, num_decode: int) -> None:
        until_s = time.monotonic() + READY_S
        while True:
            health = self.health()
            there = {role: len(members) for role, members in health.get("workers", {}).items()}
            paths = [path for path in health.get("kv_paths", ()) if not path["error"]]
            if there == {"prefill": num_prefill, "decode": num_decode} and len(paths) == num_prefill * num_decode:
                return
            if time.monotonic() > until_s:
                raise TimeoutError(f"{there} workers and {len(paths)} paths, not {num_prefill} and {num_decode}")
            time.sleep(0.2)

    def health(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            try:
                with urllib.request.urlopen(f"{URL}/health", timeout=5) as response:
                    return dict(json.load(response))
            except urllib.error.HTTPError as error:
                return dict(json.load(error))
        return {}

    def kill_process(self, service: str) -> None:
        """Of the first container of a service its program, and no probe; a killed container would not start again."""
        container = self.compose("ps", "-q", service).split()[0]
        processes = run("docker", "top", container, "-eo", "pid,args").splitlines()
        (pid,) = (int(line.split()[0]) for line in processes if f" -m {PROGRAMS[service]} " in line)
        os.kill(pid, signal.SIGKILL)


def rehearse(stack: Stack, report: list[str]) -> bool:
    """Everything that is done under load; whether all went well."""
    stack.scale(2, 3)
    load = Load(URL, NUM_CLIENTS)
    load.start()
    try:
        load.until_answers("2 + 3 workers", ANSWERS)
        load.phase = "scaled to 1 + 1"
        stack.scale(1, 1)
        load.until_answers("scaled to 1 + 1", ANSWERS)
        load.phase = "scaled to 2 + 3"
        stack.scale(2, 3)
        load.until_answers("scaled to 2 + 3", ANSWERS)
        for service in PROGRAMS:
            load.phase = f"a {service} process killed"
            stack.kill_process(service)
            load.until_answers(load.phase, ANSWERS)
            stack.await_workers(2, 3)
        report += [
            "",
            *(f"    {line}" for line in stack.compose("exec", "-T", "router", "baton", "workers").splitlines()),
        ]
        name = stack.health()["workers"]["decode"][0]["id"]
        load.phase = "a decode worker drained"
        drained = stack.compose("exec", "-T", "router", "baton", "drain", name, "--until-back")
        report += [f"    {line}" for line in drained.splitlines()[-1:]]
        load.until_answers(load.phase, ANSWERS)
        load.phase = "each worker restarted in turn"
        stack.compose("exec", "-T", "router", "baton", "drain", "--all")
        load.until_answers(load.phase, ANSWERS)
        load.phase = "the router restarted"
        stack.compose("restart", "router")
        load.until_answers(load.phase, ANSWERS)
        stack.await_workers(2, 3)
        load.phase = "all but the port stopped, and started anew"
        stack.compose("stop", *SERVING)
        os.environ["BATON_KV_BYTES"] = str(2 * POOL_BYTES)
        stack.compose("up", "-d", "--no-deps", *SERVING)
        load.until_answers(load.phase, ANSWERS)
    finally:
        load.stop()
    report += ["", "| while | answers | retries by the client |", "|---|---|---|"]
    report += [f"| {phase} | {count} | {load.retries[phase]} |" for phase, count in load.answers.items()]
    report += ["", *load.wrong[:5], f"{len(load.wrong)} answers failed or were another text than before"]
    return not load.wrong


def build(stack: Stack, report: list[str]) -> None:
    """The images, and once more after an edit."""
    first_s, _ = stack.build()
    edited = stack.tree / "common" / "base" / "version.py"
    edited.write_text(edited.read_text() + "\n# an edit\n")
    again_s, said = stack.build()
    assert "Installing collected packages: torch" not in said and "Downloading torch" not in said
    report.append(f"images built in {first_s:.0f} s; again, after an edit of a source file, in {again_s:.0f} s")
    sizes = image_bytes([BASE, *IMAGES])
    report += [f"{name}: {size / 1e6:.0f} MB" for name, size in sizes.items()]


def end(stack: Stack, report: list[str]) -> bool:
    """Stop in order; whether every container ended with 0."""
    stack.compose("stop")
    ids = stack.compose("ps", "-aq").split()
    ended = run("docker", "inspect", "-f", "{{.Name}} {{.State.ExitCode}}", *ids).splitlines()
    wrong = [line for line in ended if not line.endswith(" 0")]
    report += [f"{len(ended)} containers stopped, {len(wrong)} of them with another status than 0", *wrong]
    return not wrong


def main() -> int:
    """Prints a summary, and what went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--wheels", type=Path, help="directory with torch's wheel for CPUs, to be served as an index")
    parser.add_argument("--torch-index", default="", help="index with torch's wheels for CPUs")
    parser.add_argument("--keep", action="store_true", help="leave images and volumes")
    args = parser.parse_args()
    report: list[str] = []
    with contextlib.ExitStack() as stack_of:
        work = Path(stack_of.enter_context(tempfile.TemporaryDirectory(prefix="baton-stack-")))
        report.append(f"base: {ensure_base(work)}")
        index = stack_of.enter_context(torch_index(args.wheels, work)) if args.wheels else args.torch_index
        copied_tree(work / "tree")
        stack = Stack(work / "tree", index)
        if not args.keep:
            stack_of.callback(run, "docker", "rmi", *IMAGES)
            stack_of.callback(stack.compose, "down", "--volumes", "--timeout", "5")
        try:
            build(stack, report)
            went_well = rehearse(stack, report)
            went_well = end(stack, report) and went_well
        except BaseException:
            with contextlib.suppress(RuntimeError):
                print(stack.compose("logs", "--tail", "30"))
            raise
        finally:
            print("\n".join(report))
    return 0 if went_well else 1


if __name__ == "__main__":
    sys.exit(main())
