import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.wire.messages import Role
from deploy.placement import (
    SERVER_BYTES,
    Gpu,
    choose_gpus,
    memory_fraction,
    place_standbys,
    place_workers,
    threads_per_worker,
)

GB = 10**9
TWO_GPUS = [Gpu(0, 80 * GB), Gpu(1, 80 * GB)]


def test_one_prefill_and_one_decode_worker_get_a_gpu_each() -> None:
    placements = place_workers(1, 1, TWO_GPUS)
    assert [(each.name, each.role, each.gpu) for each in placements] == [
        ("prefill-0", Role.PREFILL, TWO_GPUS[0]),
        ("decode-0", Role.DECODE, TWO_GPUS[1]),
    ]


def test_workers_go_round_the_gpus() -> None:
    placements = place_workers(2, 3, TWO_GPUS)
    assert [(each.name, each.gpu.index if each.gpu else None) for each in placements] == [
        ("prefill-0", 0),
        ("prefill-1", 1),
        ("decode-0", 0),
        ("decode-1", 1),
        ("decode-2", 0),
    ]


def test_without_gpus_everything_is_on_the_cpu() -> None:
    assert [each.gpu for each in place_workers(1, 2, [])] == [None, None, None]


def test_a_decode_worker_is_always_needed() -> None:
    with pytest.raises(ConfigError, match="at least 0 and 1"):
        place_workers(1, 0, [])


@pytest.mark.parametrize(
    ("device", "wanted", "expected"),
    [
        ("auto", "", [0, 1]),
        ("cuda", "", [0, 1]),
        ("cuda", "1", [1]),
        ("auto", "1,0", [1, 0]),
        ("cuda:1", "", [1]),
        ("cpu", "", []),
    ],
)
def test_choose_gpus(device: str, wanted: str, expected: list[int]) -> None:
    assert [gpu.index for gpu in choose_gpus(device, wanted, TWO_GPUS)] == expected


def test_auto_takes_the_cpu_where_there_is_no_gpu() -> None:
    assert choose_gpus("auto", "", []) == []


@pytest.mark.parametrize(
    ("device", "wanted", "gpus", "message"),
    [
        ("cuda", "", [], "no GPU was found"),
        ("auto", "0", [], "no GPU was found"),
        ("cuda", "0,2", TWO_GPUS, "no GPU 2"),
        ("cuda", "zero", TWO_GPUS, "comma-separated"),
        ("tpu", "", TWO_GPUS, "device 'tpu'"),
    ],
)
def test_choose_gpus_refuses(device: str, wanted: str, gpus: list[Gpu], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_gpus(device, wanted, gpus)


def test_a_gpu_of_ones_own_is_taken_up_to_the_total() -> None:
    placements = place_workers(1, 1, TWO_GPUS)
    assert memory_fraction(placements[0], placements, 0.9, 16 * GB, has_server=False) == 0.9


def test_on_a_shared_gpu_each_gets_its_weights_and_decode_twice_the_pool() -> None:
    placements = place_workers(1, 1, TWO_GPUS[:1])
    prefill, decode = (memory_fraction(each, placements, 0.9, 8 * GB, has_server=False) for each in placements)
    assert prefill == pytest.approx(0.1 + 0.7 / 3, abs=1e-4)
    assert decode == pytest.approx(0.1 + 0.7 * 2 / 3, abs=1e-4)


def test_copies_of_the_weights_that_do_not_fit_are_refused() -> None:
    placements = place_workers(1, 1, [Gpu(0, 24 * GB)])
    with pytest.raises(ConfigError, match=r"11\.0 GB of weights for each of 2 workers"):
        memory_fraction(placements[0], placements, 0.9, 11 * GB, has_server=False)


def test_beside_a_memory_server_the_weights_count_once_and_the_rest_is_one_pool() -> None:
    placements = place_workers(1, 1, [Gpu(0, 24 * GB)])
    shares = [memory_fraction(each, placements, 0.9, 15 * GB, has_server=True) for each in placements]
    both = 0.9 - SERVER_BYTES / (24 * GB)
    assert shares == pytest.approx([both, both], abs=1e-4), "whoever comes first makes the pool of all"
    with pytest.raises(ConfigError, match=r"22\.0 GB of weights once do not leave room"):
        memory_fraction(placements[0], placements, 0.9, 22 * GB, has_server=True)


def test_a_standby_is_on_each_device_that_has_workers_of_its_role() -> None:
    workers = place_workers(1, 3, TWO_GPUS)
    standbys = place_standbys(workers, [Role.PREFILL, Role.DECODE])
    assert [(each.name, each.gpu, each.standby) for each in standbys] == [
        ("prefill-standby-0", TWO_GPUS[0], 1),
        ("decode-standby-0", TWO_GPUS[1], 2),
        ("decode-standby-1", TWO_GPUS[0], 1),
    ]
    assert place_standbys(workers, []) == []


def test_a_standby_has_no_weights_and_no_pool_of_its_own() -> None:
    workers = place_workers(1, 1, [Gpu(0, 24 * GB)])
    placements = workers + place_standbys(workers, [Role.DECODE])
    alone = memory_fraction(workers[0], workers, 0.9, 15 * GB, has_server=True)
    assert {memory_fraction(each, placements, 0.9, 15 * GB, has_server=True) for each in placements} == {alone}
    with pytest.raises(ConfigError, match="set --memory on"):
        memory_fraction(workers[0], placements, 0.9, GB, has_server=False)


@given(
    num_prefill=st.integers(0, 5),
    num_decode=st.integers(1, 5),
    num_gpus=st.integers(1, 4),
    total=st.floats(0.1, 0.98),
    known=st.booleans(),
    standbys=st.sampled_from([[], [Role.DECODE], [Role.PREFILL, Role.DECODE]]),
)
def test_shares_on_a_gpu_never_exceed_the_total(
    num_prefill: int, num_decode: int, num_gpus: int, total: float, known: bool, standbys: list[Role]
) -> None:
    gpus = [Gpu(index, 200 * GB if known else 0) for index in range(num_gpus)]
    placements = place_workers(num_prefill, num_decode, gpus)
    placements += place_standbys(placements, standbys)
    for gpu in gpus:
        here = [each for each in placements if each.gpu == gpu]
        shares = [memory_fraction(each, placements, total, GB, has_server=bool(standbys)) for each in here]
        together = max(shares, default=0.0) if standbys else sum(shares)
        assert together <= total + 1e-9
        assert all(share > 0 for share in shares)


@pytest.mark.parametrize(("num_cores", "num_workers", "expected"), [(16, 2, 8), (7, 2, 3), (2, 5, 1)])
def test_threads_per_worker(num_cores: int, num_workers: int, expected: int) -> None:
    assert threads_per_worker(num_cores, num_workers) == expected
