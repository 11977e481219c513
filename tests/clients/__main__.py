"""Run other people's clients, each in an environment of its own, against a server that runs.

    baton serve deploy/demo_model &
    python -m tests.clients --url http://127.0.0.1:8000 --model-path deploy/demo_model --write

Environments are made at the first run (a few gigabytes) and used again; `--only` names a few. `--write` puts what was
seen of each into the table in tests/clients/README.md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from tests.clients.cases import CASES, Case, Server
from tests.clients.environments import make_environment

PAGE = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- clients -->\n", "<!-- end of clients -->"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.clients", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
    parser.add_argument("--model-path", type=Path, required=True, help="directory of the model it serves")
    parser.add_argument("--environments", type=Path, default=Path(tempfile.gettempdir()) / "baton-clients")
    parser.add_argument("--only", default="", help="names of clients, with commas between them")
    parser.add_argument("--write", action="store_true", help="put what was seen into tests/clients/README.md")
    args = parser.parse_args(argv)
    with urllib.request.urlopen(f"{args.url}/v1/models", timeout=10) as response:
        model = json.load(response)["data"][0]["id"]
    server = Server(args.url, model, args.model_path.resolve())
    wanted = args.only.split(",") if args.only else [case.name for case in CASES]
    if unknown := set(wanted) - {case.name for case in CASES}:
        parser.error(f"--only {args.only}: no client is named {sorted(unknown)[0]!r}")
    rows, num_failed = {}, 0
    for case in CASES:
        if case.name in wanted:
            seen, is_ok = run(case, server, args.environments)
            num_failed += not is_ok
            rows[case.name] = f"| {case.name} | {' '.join(case.requirements)} | {case.does} | {seen} | {origin()} |"
            print(rows[case.name], flush=True)
    if args.write:
        write(rows)
    return 1 if num_failed else 0


def origin() -> str:
    """The day, and the commit that is checked out."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    return f"{datetime.now(UTC):%Y-%m-%d}, {commit.strip()}"


def run(case: Case, server: Server, environments: Path) -> tuple[str, bool]:
    """What was seen, or how it failed."""
    environment = make_environment(case.kind, environments / case.client, case.requirements)
    with tempfile.TemporaryDirectory() as directory:
        try:
            return case.run(environment, server, Path(directory)), True
        except (AssertionError, KeyError, subprocess.SubprocessError) as error:
            print(getattr(error, "stdout", "") or "", getattr(error, "stderr", "") or "", file=sys.stderr)
            return f"**failed**: {error!s:.200}".replace("\n", " "), False


def write(rows: Mapping[str, str]) -> None:
    """Put these rows into the page's table; those of other clients stay as they are."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    table, after = rest.split(END)
    known = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()[3:] if line}
    found = {**known, **rows}
    lines = [found[case.name] for case in CASES if case.name in found]
    head = ["| client | version | what it does | what was seen | with |", "|---|---|---|---|---|"]
    PAGE.write_text(before + BEGIN + "\n".join(["", *head, *lines, "", END]) + after, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
