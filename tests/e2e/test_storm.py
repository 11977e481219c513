"""Short storms from fixed seeds: workers die, drain, stand still and are replaced, and no client notices."""

import pytest

from benchmarks.storm.__main__ import main
from tests.support.hosts import needs_hosts

pytestmark = pytest.mark.slow


@pytest.mark.timeout(600)
def test_no_client_notices_a_storm(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--minutes", "0.25", "--interval-s", "2", "--seed", "1"])
    output = capsys.readouterr().out
    assert status == 0, output
    assert "0 lost, 0 wrong, 0 crashed, 0 left over" in output


@needs_hosts()
@pytest.mark.timeout(600)
def test_no_client_notices_what_happens_to_a_network_and_to_a_host(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ["delay", "lose", "slow", "reorder", "cut", "deafen", "mute", "vanish", "still", "kill"]
    flags = ["--two-hosts", "--minutes", "0.5", "--interval-s", "3", "--prefill", "1", "--decode", "1", "--seed", "2"]
    status = main([*flags, "--kinds", *kinds])
    output = capsys.readouterr().out
    assert status == 0, output
    assert "0 lost, 0 wrong, 0 crashed, 0 left over" in output
