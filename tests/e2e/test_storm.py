"""A short storm from a fixed seed: workers die, drain, stand still and are replaced, and no client notices."""

import pytest

from benchmarks.storm.__main__ import main

pytestmark = pytest.mark.slow


@pytest.mark.timeout(600)
def test_no_client_notices_a_storm(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--minutes", "0.25", "--interval-s", "2", "--seed", "1"])
    output = capsys.readouterr().out
    assert status == 0, output
    assert "0 lost, 0 wrong, 0 crashed, 0 left over" in output
