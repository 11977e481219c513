"""Quantized checkpoints of the bundled model write the text that a single process writes with plain weights."""

import shutil
from pathlib import Path

import pytest

from tests.e2e.client import Reference, complete_all, prompts
from tests.e2e.system import System
from tests.support import packers
from tests.support.packed_checkpoints import FP8, GPTQ, Case, pack_checkpoint

DEMO_MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"
CASES = {
    "fp8-blocks": Case(FP8, packers.fp8_blocks()),
    "int4": Case(GPTQ | {"group_size": 64}, packers.gptq(4, 64)),
}


@pytest.mark.medium
@pytest.mark.parametrize("case", CASES)
async def test_text_of_a_quantized_checkpoint_equals_a_single_process(case: str, tmp_path: Path) -> None:
    import transformers

    packed, plain = tmp_path / "packed", tmp_path / "plain"
    for directory in (packed, plain):
        shutil.copytree(DEMO_MODEL, directory)
    pack_checkpoint(packed, plain, CASES[case], evenly=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype="float32", attn_implementation="eager")
    asked = prompts(6, 1, 120)
    flags = () if case == "int4" else ("--model-quantization", "plain")  # products of 8 bits quantize inputs, too
    with System(packed, *flags, router_flags=flags).start() as system:
        completions = await complete_all(system.url, asked, max_tokens=24)
        assert [completion.error for completion in completions] == [None] * len(asked)
        reference = Reference(packed, model)
        assert [completion.text for completion in completions] == [reference.text(prompt, 24) for prompt in asked]
        log = system.log("prefill-0") + system.log("decode-0")
        assert "28 matrices in" in log and ("28 of 28 matrices stay packed" in log) == (case == "int4")
        system.until(system.all_blocks_free)
