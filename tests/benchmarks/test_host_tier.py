"""The host tier's benchmark moves what it says, and tells how long that and others' answers took."""

import shlex

import pytest

from benchmarks.host_tier import main


@pytest.mark.medium
def test_what_goes_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split("--tier-gb 0.15 --pool-blocks 40 --sizes 8,16 --rounds 2")) == 0
    cells = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    rows = {(cell[1].strip(), cell[2].strip()): cell[3].strip() for cell in cells}
    for what in ("out", "back"):
        for size in ("8", "16"):
            assert float(rows[what, size].split()[0]) > 0
    assert {"idle", "out", "back"} <= {what for what, _ in rows}


@pytest.mark.parametrize("flags", ["--sizes many", "--sizes 40 --pool-blocks 40"])
def test_sizes_are_numbers_of_blocks_that_the_pool_has(flags: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(flags.split())
