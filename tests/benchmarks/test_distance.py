"""What the distance of a decode worker is said to cost."""

from benchmarks.distance import Tokens, figures_of
from benchmarks.link_rate import rate


def test_what_two_hosts_need_beyond_one_and_the_transfer_is_told() -> None:
    here = [Tokens(1.0, 1.5), Tokens(3.0, 3.5), Tokens(2.0, 2.5)]
    apart = [Tokens(each.first_s, 1.1 * (each.second_s + 0.5)) for each in here]
    found = {figure.name: figure.value for figure in figures_of(here, apart, transfer_s=0.5)}
    assert (found["transfer"], found["one_host_ttft"], found["ttft"]) == (500, 2000, 2000)
    assert round(found["ttft_over"]) == -20 and round(found["second_over"]) == 10
    assert round(found["second"]) == 3300


def test_the_rate_of_a_socket_is_measured() -> None:
    assert rate([], [], "127.0.0.1", 8 << 20) > 0
