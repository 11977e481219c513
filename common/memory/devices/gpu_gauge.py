"""Gauge of a GPU's load and temperature, in a thread, because NVML may be too slow for a server's loop."""

import importlib
import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
UNKNOWN = -1


class GpuUse(NamedTuple):
    """A reading; UNKNOWN for values that NVML does not tell."""

    percent: int = UNKNOWN  # share of recent time with a running kernel
    celsius: int = UNKNOWN


class GpuGauge:
    """Reads a GPU until `close`. Without NVML `now` stays unknown, and the log says why.

    Args:
        uuid: CUDA's UUID of the GPU.
        nvml: replaces NVIDIA's binding `pynvml`.
    """

    def __init__(self, uuid: str, nvml: Any = None) -> None:
        self.now = GpuUse()
        self._uuid, self._nvml = uuid, nvml
        self._is_over = threading.Event()
        self.thread = threading.Thread(target=self._read_forever, name="gpu gauge", daemon=True)
        self.thread.start()

    def close(self) -> None:
        self._is_over.set()

    def _read_forever(self) -> None:
        try:
            nvml, handle = self._opened()
        except ImportError:
            logger.info("how busy the GPU is cannot be told without NVIDIA's binding: pip install nvidia-ml-py")
            return
        except Exception as error:  # noqa: BLE001 - a gauge that is broken costs a number and nothing else
            logger.info("how busy the GPU is cannot be told: %s", error)
            return
        while not self._is_over.wait(PERIOD_S if self.now != GpuUse() else 0.0):
            self.now = GpuUse(
                _reading(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
                _reading(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            )
            if self.now == GpuUse():
                return

    def _opened(self) -> tuple[Any, Any]:
        nvml = self._nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
        return nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{self._uuid}")


def _reading(read: Callable[[], int]) -> int:
    """Return a reading, or UNKNOWN, because a part of a GPU may have no such reading."""
    try:
        return int(read())
    except Exception:  # noqa: BLE001
        return UNKNOWN
