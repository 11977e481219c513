"""Which stream a step is on, and that steps keep their order across streams."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
import triton
import triton.language as tl

from common.device.engine import cublas, gpu_share
from common.device.engine.gpu_share import GpuShare, LimitedShare, make_share, share_of
from common.kernels.base.gpu import Gpu, gpu_of


@triton.jit
def whereabouts(sm_ptr):  # type: ignore[no-untyped-def]
    """The multiprocessor that each program runs on, `[num_programs]` int32."""
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(sm_ptr + tl.program_id(0), sm)


class Stream:
    """Writes down what it is told."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done with streams."""
    log: list[str] = []

    @contextmanager
    def enter(stream: Stream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield
        log.append("off")

    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(cublas, "set_sm_count", lambda num_sms: log.append(f"products for {num_sms or 'all'}"))
    return log


def limited_share(log: list[str]) -> LimitedShare:
    whole, limited = (cast(Any, Stream(name, log)) for name in ("whole", "limited"))
    return LimitedShare(whole, limited, 104)


def test_a_stream_waits_for_the_other_before_a_step_changes_over(log: list[str]) -> None:
    share = limited_share(log)
    for whole in (False, False, True, True, False):
        with share.stream(whole=whole):
            log.append("step")
    on_limited = ["on limited", "products for 104", "step", "products for all", "off"]
    on_whole = ["on whole", "step", "off"]
    assert log == [
        *("limited waits for whole", *on_limited, *on_limited),
        *("whole waits for limited", *on_whole, *on_whole),
        *("limited waits for whole", *on_limited),
    ]


def test_order_and_products_are_as_ever_after_a_step_that_failed(log: list[str]) -> None:
    share = limited_share(log)
    with pytest.raises(ValueError, match="in the middle"), share.stream(whole=False):
        raise ValueError("in the middle")
    assert log[-1] == "products for all"
    log.clear()
    with share.stream(whole=True):
        pass
    assert log[0] == "whole waits for limited"


@pytest.mark.parametrize(("percent", "device"), [(100, "cuda:0"), (50, "cpu")])
def test_nothing_is_limited_at_100_or_on_a_cpu(percent: int, device: str, log: list[str]) -> None:
    share = make_share(percent, torch.device(device))
    assert share.limited is None
    with share.stream(whole=False), share.stream(whole=True):
        pass
    assert type(share) is GpuShare and log == []


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """As far as its properties go."""
    gpu = Gpu("NVIDIA H200", (9, 0), num_sms=132, shared_bytes=227 << 10)
    monkeypatch.setattr(gpu_share, "gpu_of", lambda device: gpu)
    return torch.device("cuda:1")


def test_without_green_contexts_the_whole_gpu_is_used_and_the_log_says_so(
    h200: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.cuda.green_contexts.SUPPORTED", False)
    assert type(make_share(50, h200)) is GpuShare
    assert "prefill.sm_share = 50: 64 of 132" in caplog.text and "has no green contexts" in caplog.text


def test_a_gpu_that_cannot_be_divided_is_used_whole_and_the_log_says_so(
    h200: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing:
        @staticmethod
        def create(*, num_sms: int, device_id: int) -> object:
            raise RuntimeError(f"no {num_sms} SMs on {device_id}\nC++ stack")

    monkeypatch.setattr("torch.cuda.green_contexts.SUPPORTED", True)
    monkeypatch.setattr("torch.cuda.green_contexts.GreenContext", Refusing)
    assert type(make_share(80, h200)) is GpuShare
    assert "104 of 132 multiprocessors cannot be set apart (no 104 SMs on 1)" in caplog.text
    assert "C++ stack" not in caplog.text


def test_a_share_is_kept_where_cublas_cannot_be_told_and_the_log_says_so(
    h200: torch.device, log: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(num_sms: int) -> None:
        raise OSError("libcublas.so.13: not found")

    monkeypatch.setattr(cublas, "set_sm_count", refuse)
    monkeypatch.setattr(
        "common.device.engine.gpu_share.limited_stream", lambda num_sms, device: Stream(f"{num_sms} SMs", log)
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("whole", log))
    with make_share(80, h200).stream(whole=False):
        log.append("step")
    assert log == ["104 SMs waits for whole", "on 104 SMs", "step", "off"]
    assert "cuBLAS cannot be told its size (libcublas.so.13: not found)" in caplog.text


def test_shares_are_whole_groups() -> None:
    assert [share_of(132, percent) for percent in (1, 50, 80, 99)] == [8, 64, 104, 128]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("is_captured", [False, True])
def test_kernels_keep_to_the_share_launched_or_replayed(is_captured: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    share = make_share(50, device)
    num_sms = gpu_of(device).num_sms
    sms = torch.full((64 * num_sms,), -1, dtype=torch.int32, device=device)

    def run(*, whole: bool) -> int:
        """How many multiprocessors the kernel is seen on."""
        with share.stream(whole=whole):
            sms.fill_(-1)
            if is_captured and not whole:
                graph.replay()
            else:
                whereabouts[(sms.numel(),)](sms)
            seen = set(sms.tolist())
        assert -1 not in seen
        return len(seen)

    whereabouts[(1,)](sms)
    graph = torch.cuda.CUDAGraph()
    if is_captured:
        with torch.cuda.graph(graph, stream=share.limited):
            whereabouts[(sms.numel(),)](sms)
    limit = share_of(num_sms, 50)
    assert [run(whole=False) <= limit < run(whole=True) for _ in range(3)] == [True] * 3


def sm_count() -> int:
    """The number of multiprocessors that cuBLAS plans for; 0 means the whole GPU."""
    num_sms = ctypes.c_int()
    assert not cublas._library().cublasGetSmCountTarget(cublas._handle(), ctypes.byref(num_sms))
    return int(num_sms.value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cublas_knows_the_share_and_computes_the_same() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    share, limit = make_share(50, device), share_of(gpu_of(device).num_sms, 50)
    x, weight = torch.randn(2, 700, 700, device=device, dtype=torch.bfloat16).unbind()
    expected = x.float() @ weight.float()
    torch.cuda.synchronize()  # the streams of a share do not wait for others
    for whole, known in ((False, limit), (True, 0), (False, limit)):
        with share.stream(whole=whole):
            assert sm_count() == known
            product = x @ weight
        torch.cuda.synchronize()
        torch.testing.assert_close(product.float(), expected, rtol=2e-2, atol=0.3)
    assert sm_count() == 0
