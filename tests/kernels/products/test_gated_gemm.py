import pytest
import torch
from torch import Tensor

from common.base.activation import Activation
from common.device.engine.gpu_share import make_share
from common.kernels.products.gated_gemm import gated_gemm
from common.ops import reference
from tests.kernels.conftest import AssertClose

SHAPES = [(8, 8), (136, 64), (1000, 200), (128, 640), (2048, 2560)]


def operands(m: int, n: int, k: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tokens and weights; what lies behind both in memory is NaN, and so would be every output that it touched."""
    x, weight = torch.randn(m, k) * 3, torch.randn(2 * n, k) * k**-0.5
    nan = float("nan")
    padded = [torch.cat((rows, torch.full((256, k), nan))).to(device, dtype)[: len(rows)] for rows in (x, weight)]
    return padded[0], padded[1]


def expected(x: Tensor, weight: Tensor, activation: Activation = Activation.SILU) -> Tensor:
    return reference.gate_mul(x.double() @ weight.double().t(), activation).to(x.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", [1, 64, 65, 127, 128, 129, 1000, 5000])
def test_gated_gemm(
    m: int, n: int, k: int, dtype: torch.dtype, hopper: torch.device, assert_close: AssertClose
) -> None:
    x, weight = operands(m, n, k, hopper, dtype)
    assert_close(gated_gemm(x, weight), expected(x, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", Activation)
def test_every_activation(activation: Activation, hopper: torch.device, assert_close: AssertClose) -> None:
    x, weight = operands(1000, 1000, 200, hopper, torch.bfloat16)
    assert_close(gated_gemm(x, weight, activation.value), expected(x, weight, activation))


@pytest.mark.gpu
def test_again_in_a_captured_graph(hopper: torch.device, assert_close: AssertClose) -> None:
    """Every replay begins to draw at the first tile, and sees the tokens of its time."""
    x, weight = operands(700, 1000, 200, hopper, torch.bfloat16)
    gated_gemm(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gated_gemm(x, weight)
    for _ in range(3):
        x.normal_()
        out.fill_(float("nan"))
        graph.replay()
        assert_close(out, expected(x, weight))


@pytest.mark.gpu
def test_the_same_bits_every_time(hopper: torch.device) -> None:
    x, weight = operands(3000, 2048, 640, hopper, torch.bfloat16)
    first = gated_gemm(x, weight)
    for _ in range(50):
        assert torch.equal(gated_gemm(x, weight), first)


@pytest.mark.gpu
def test_the_same_bits_on_a_share_of_the_gpu(hopper: torch.device) -> None:
    """Few programs run at once there: they take all items, and the others start when none is left."""
    share = make_share(1, torch.device("cuda", torch.cuda.current_device()))
    if share.limited is None:
        pytest.skip("this GPU cannot be divided")
    x, weight = operands(3000, 2048, 640, hopper, torch.bfloat16)
    on_all = gated_gemm(x, weight)
    with share.stream(whole=False):
        on_few = gated_gemm(x, weight)
    torch.cuda.synchronize()
    assert torch.equal(on_few, on_all)


@pytest.mark.parametrize(
    ("x", "weight", "what"),
    [
        (torch.zeros(4, 64), torch.zeros(16, 64), "16 bits"),
        (torch.zeros(4, 64).half(), torch.zeros(16, 64).bfloat16(), "alike"),
        (torch.zeros(4, 64).half(), torch.zeros(16, 32).half(), "contiguous"),
        (torch.zeros(64, 4).half().t(), torch.zeros(16, 64).half(), "contiguous"),
        (torch.zeros(0, 64).half(), torch.zeros(16, 64).half(), "at least one"),
        (torch.zeros(4, 60).half(), torch.zeros(16, 60).half(), "multiples of 8"),
    ],
)
def test_what_it_does_not_take_is_refused(x: Tensor, weight: Tensor, what: str) -> None:
    with pytest.raises(AssertionError, match=what):
        gated_gemm(x, weight)
