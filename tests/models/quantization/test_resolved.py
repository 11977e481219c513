"""`model.quantization` on every device, for every form: what stays in codes, and what the log says of it."""

import itertools
import logging
from collections.abc import Callable

import pytest

from common.kernels.base.gpu import MIN_CAPABILITY
from common.models.forms import OLDEST, Capability, Target, forms_on
from common.models.held import read_model
from common.models.loader import load_model
from common.models.quantization.kept import OF_FLOATS
from common.models.sizes.codes import PAIRS, Codes
from common.settings.config import DTYPES, KERNELS, QUANTIZATIONS
from tests.models.quantization.conftest import Written
from tests.models.quantization.test_integers import FORMS
from tests.models.quantization.test_kept import BLOCKS as FP8_BLOCKS
from tests.models.quantization.test_kept import ROWS
from tests.models.test_quantization import Kept
from tests.support.forms import on_cpu

CAPABILITIES: tuple[Capability | None, ...] = (
    None, (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1),
)  # fmt: skip
CPU, ADA, HOPPER = Target(None), Target((8, 9)), Target((9, 0))
INTEGERS = [
    Codes(dtype, 1, columns, scales, offsets)
    for dtype, columns, scales in itertools.product((PAIRS, "int8"), (16, 32, 64, 128, 2560), ("float16", "float32"))
    for offsets in ("", scales)
]
IN_GROUPS = [*INTEGERS, OF_FLOATS]
BYTES = [*(Codes("float8_e4m3fn", *block) for block in ((1, 0), (1, 128), (128, 128))), Codes("int8", 1, 0)]


@pytest.mark.parametrize("choice", QUANTIZATIONS)
def test_each_form_stays_where_it_is_as_fast_or_was_asked_for(choice: str) -> None:
    for capability, dtype, linear in itertools.product(CAPABILITIES, DTYPES, KERNELS):
        forms = forms_on(Target(capability, dtype, linear), choice)
        is_computed = capability is not None and dtype != "float32" and linear == "triton"
        for form in IN_GROUPS:
            is_large = form.dtype == PAIRS and form.columns >= 128
            is_fast = is_computed and (is_large or (form.has_pairs and capability == (9, 0)))
            assert forms.stays(form) == (choice == "packed" or (choice == "auto" and is_fast)), (forms, form)
        assert {forms.stays(form) for form in BYTES} == {choice in ("auto", "packed")}, forms
        assert forms.choice == choice and bool(forms.reason) == (choice == "auto")


def test_a_gpu_of_unknown_capability_is_taken_for_the_oldest_that_is_served() -> None:
    assert OLDEST == MIN_CAPABILITY


@pytest.mark.parametrize("case", [*FORMS, *FP8_BLOCKS, *ROWS])
def test_a_checkpoint_is_held_as_its_device_is_fast(case: str, written: Callable[[str], Written]) -> None:
    directory, _ = written(case)
    found = {choice: read_model(directory, on_cpu(choice)).codes for choice in ("packed", "plain")}
    assert found["packed"] and not found["plain"]
    is_wide = case in FORMS and FORMS[case].dtype == "int8"
    is_slow = is_wide or (case in FORMS and FORMS[case].columns < 128)
    on_hopper, on_ada = ("plain" if is_held_plain else "packed" for is_held_plain in (is_wide, is_slow))
    on_a_cpu = "plain" if case in FORMS else "packed"
    assert read_model(directory, forms_on(HOPPER, "auto")).codes == found[on_hopper]
    assert read_model(directory, forms_on(ADA, "auto")).codes == found[on_ada]
    assert read_model(directory, on_cpu("auto")).codes == found[on_a_cpu]


LINES = {
    ("gptq", CPU, "auto"): "products are plain, by model.quantization = auto on a CPU; 6 in INT4 in groups of 32 are "
    "made plain, because products with codes in groups take several times longer there "
    "(model.quantization = packed keeps them); 0.0",
    ("gptq", CPU, "packed"): "products are in the checkpoint's codes: 6 in INT4 in groups of 32, by "
    "model.quantization = packed on a CPU; 0.0",
    ("gptq", HOPPER, "auto"): "products are in the checkpoint's codes: 6 in INT4 in groups of 32, by "
    "model.quantization = auto on a GPU of capability 9.0; 0.0",
    ("gptq", ADA, "auto"): "products are plain, by model.quantization = auto on a GPU of capability 8.9; 6 in INT4 "
    "in groups of 32 are made plain, because products with these take longer there than with 16 bits "
    "(model.quantization = packed keeps them); 0.0",
    ("marlin-rows", HOPPER, "auto"): "products are in the checkpoint's codes: 6 in INT4 in groups of 256, by "
    "model.quantization = auto on a GPU of capability 9.0; 0.0",
    ("gptq", HOPPER._replace(dtype="float32"), "auto"): "because no kernel multiplies by codes in groups in "
    "model.dtype = float32 (model.quantization = packed keeps them); 0.0",
    ("gptq", HOPPER._replace(linear="torch"), "auto"): "because kernels.linear = torch has no kernel for codes in "
    "groups (model.quantization = packed keeps them); 0.0",
    ("gptq-int8", HOPPER, "auto"): "products are plain, by model.quantization = auto on a GPU of capability 9.0; 6 in "
    "INT8 in groups of 256, 2 in INT8 in groups of 320 are made plain, because products with these take longer "
    "there than with 16 bits (model.quantization = packed keeps them); 0.0",
    ("fp8-blocks", CPU, "auto"): "products are in the checkpoint's codes: 8 in FP8, by model.quantization = auto on a "
    "CPU; 0.0",
    ("gptq", CPU, "fp8"): "products are quantized to fp8: 8 in FP8; 0.0",
}  # fmt: skip


@pytest.mark.parametrize("asked", LINES, ids=lambda asked: f"{asked[0]}-{asked[2]}-{asked[1].label}")
def test_a_line_says_in_which_form_matrices_are_held_and_why(
    asked: tuple[str, Target, str], written: Callable[[str], Written], caplog: pytest.LogCaptureFixture
) -> None:
    case, target, choice = asked
    directory, _ = written(case)
    with caplog.at_level(logging.INFO, logger="common.models.loader"):
        config = read_model(directory, forms_on(target, choice))
        load_model(directory, config, max_len=64, dtype="float32", memory=Kept())[1].wait()
    [line] = [record.getMessage() for record in caplog.records if record.name == "common.models.loader"]
    assert LINES[asked] in line
