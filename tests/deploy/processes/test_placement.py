import pytest

from common.base.errors import ConfigError
from common.wire.messages.worker import Role
from deploy.processes.placement import (
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


def test_the_workers_of_a_gpu_take_all_but_what_their_memory_server_takes() -> None:
    gpu = Gpu(0, 24 * GB)
    assert memory_fraction(gpu, 0.9, 15 * GB) == pytest.approx(0.9 - SERVER_BYTES / (24 * GB), abs=1e-4)
    assert memory_fraction(Gpu(0, 0), 0.9, 15 * GB) == 0.9, "of one whose size is not known"
    with pytest.raises(ConfigError, match=r"22\.0 GB of weights do not leave room for KV in 90% of 24\.0 GB"):
        memory_fraction(gpu, 0.9, 22 * GB)


def test_a_standby_is_on_each_device_that_has_workers_of_its_role() -> None:
    workers = place_workers(1, 3, TWO_GPUS)
    standbys = place_standbys(workers, [Role.PREFILL, Role.DECODE])
    assert [(each.name, each.gpu, each.standby) for each in standbys] == [
        ("prefill-standby-0", TWO_GPUS[0], 1),
        ("decode-standby-0", TWO_GPUS[1], 2),
        ("decode-standby-1", TWO_GPUS[0], 1),
    ]
    assert place_standbys(workers, []) == []


@pytest.mark.parametrize(("num_cores", "num_workers", "expected"), [(16, 2, 8), (7, 2, 3), (2, 5, 1)])
def test_threads_per_worker(num_cores: int, num_workers: int, expected: int) -> None:
    assert threads_per_worker(num_cores, num_workers) == expected
