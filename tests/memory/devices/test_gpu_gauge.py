"""A gauge tells what NVML says, and costs nothing but a number where that says nothing."""

import threading
from collections.abc import Callable
from types import SimpleNamespace

from common.memory.devices.gpu_gauge import UNKNOWN, GpuGauge, GpuUse

DEADLINE_S = 60.0


class FakeNvml:
    """NVIDIA's binding, with one GPU."""

    NVML_TEMPERATURE_GPU = 0

    def __init__(self, read: Callable[[], int] = lambda: 87) -> None:
        self.read, self.is_asked = read, threading.Event()

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-mine":
            raise ValueError("Not Found")
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(gpu=self.read())

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        self.is_asked.set()
        return 64


def ended(gauge: GpuGauge) -> bool:
    gauge.thread.join(DEADLINE_S)
    return not gauge.thread.is_alive()


def use_after_one_reading(nvml: FakeNvml) -> GpuUse:
    gauge = GpuGauge("mine", nvml)
    assert nvml.is_asked.wait(DEADLINE_S)
    gauge.close()
    assert ended(gauge)
    return gauge.now


def test_it_tells_how_busy_and_how_warm_its_gpu_is() -> None:
    assert use_after_one_reading(FakeNvml()) == GpuUse(87, 64)


def test_what_a_gpu_does_not_say_is_unknown_and_the_rest_is_told() -> None:
    """As parts of a GPU (MIG), which have no use of their own."""

    def refuse() -> int:
        raise RuntimeError("Not Supported")

    assert use_after_one_reading(FakeNvml(refuse)) == GpuUse(UNKNOWN, 64)


def test_without_nvml_or_that_gpu_nothing_is_told() -> None:
    for gauge in (GpuGauge("another", FakeNvml()), GpuGauge("mine", SimpleNamespace())):
        assert ended(gauge) and gauge.now == GpuUse()
