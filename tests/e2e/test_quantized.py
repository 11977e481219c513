"""Quantized checkpoints write the text that a single process writes with plain weights."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.e2e.client import Reference, complete_all, prompts
from tests.e2e.system import System
from tests.support import packers
from tests.support.checkpoints import write_checkpoint
from tests.support.packed_checkpoints import AWQ, GPTQ, MODELOPT, Case, pack_checkpoint

DEMO_MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"


class Checkpoint(NamedTuple):
    """A checkpoint whose inputs are not quantized: of the bundled model, or with experts, which stay as they are."""

    case: Case
    line: str  # of the log
    flags: tuple[str, ...] = ()
    experts: dict[str, Any] | None = None  # sizes


CASES = {
    "fp8-blocks": Checkpoint(
        Case(MODELOPT | {"quant_algo": "FP8_PB_WO"}, packers.fp8_blocks()),
        "48 of 63 matrices stay in 8 bits",
        experts={"hidden_size": 256, "moe_intermediate_size": 128},
    ),
    "int4": Checkpoint(
        Case(GPTQ | {"group_size": 64}, packers.gptq(4, 64)),
        "28 of 28 matrices stay packed",
        ("--model-quantization", "packed"),
    ),
    "int4 experts": Checkpoint(
        Case(AWQ | {"group_size": 32}, packers.awq(32)),
        "62 of 63 matrices stay packed",
        ("--model-quantization", "packed"),
        {"hidden_size": 256, "moe_intermediate_size": 128},
    ),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", CASES)
async def test_text_of_a_quantized_checkpoint_equals_a_single_process(name: str, tmp_path: Path) -> None:
    import transformers

    case, line, flags, experts = CASES[name]
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    if experts is None:
        shutil.copytree(DEMO_MODEL, packed)
    else:
        write_checkpoint("qwen3-moe", packed, sizes=experts)
    shutil.copytree(packed, plain)
    pack_checkpoint(packed, plain, case, evenly=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype="float32", attn_implementation="eager")
    asked = prompts(6, 1, 120)
    with System(packed, *flags, router_flags=flags).start() as system:
        completions = await complete_all(system.url, asked, max_tokens=24)
        assert [completion.error for completion in completions] == [None] * len(asked)
        reference = Reference(packed, model)
        assert [completion.text for completion in completions] == [reference.text(prompt, 24) for prompt in asked]
        assert line in system.log("prefill-0") + system.log("decode-0")
        system.until(system.all_blocks_free)
