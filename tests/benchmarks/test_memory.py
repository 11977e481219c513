"""The memory server's benchmark asks for what it says and gets all of it."""

import shlex

import pytest

from benchmarks.memory import main


@pytest.mark.medium
def test_every_request_gets_its_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--requests-per-s 200 --steps-per-s 20 --pairs 2 --duration-s 1 --case-s 0.2"
    assert main(shlex.split(flags)) == 0
    cells = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    rows = {cell[1].strip(): cell[2].strip() for cell in cells}
    assert {"share of a core", "lease p50", "lease p99", "steps without their blocks"} < rows.keys()
    assert float(rows["requests/s begun"]) > 0
    assert {"match of 64", "match of 1,000", "seal of 64", "seal of 64 known"} < rows.keys()
