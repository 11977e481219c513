"""Published configurations of quantized checkpoints give the format of each module, or are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.base.errors import ModelError
from common.models.quantization.configs.reading import read_quantization
from common.models.quantization.rules import EXPRESSIONS, Match, formats_of
from common.models.reading import read_config
from common.models.settings import Settings
from tests.support.checkpoints import write_checkpoint

BLOCKS = "FP8 with a scale for 128 rows x 128 columns"
ROWS = "FP8 with a scale for 1 rows x all columns"
WHOLE = "FP8 with a scale for all rows x all columns"
INT8 = "INT8 with a scale for 1 rows x all columns"
Q, DOWN, HEAD = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"
EXPERT, DENSE = "model.layers.3.mlp.experts.7.gate_proj", "model.layers.0.mlp.gate_proj"

READ: dict[str, tuple[str, dict[str, str | None]]] = {
    "Qwen3-8B-FP8": (
        """{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}""",
        {Q: BLOCKS, DOWN: BLOCKS},
    ),
    "Qwen3-30B-A3B-FP8": (
        """{"activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head",
        "model.layers.0.input_layernorm", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
        "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}""",
        {Q: BLOCKS, EXPERT: BLOCKS, HEAD: None, "model.layers.1.mlp.gate": None, DENSE: BLOCKS},
    ),
    "Qwen3.5-FP8, whose list has the wrapper": (
        """{"activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head",
        "model.language_model.layers.0.linear_attn.in_proj_a", "model.visual"],
        "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}""",
        {
            "model.language_model.layers.0.linear_attn.in_proj_a": None,
            "model.visual.blocks.0.attn.qkv": None,
            "model.language_model.layers.0.linear_attn.in_proj_qkv": BLOCKS,
        },
    ),
    "DeepSeek-V3.1": (
        """{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128]}""",
        {"model.layers.0.self_attn.kv_b_proj": BLOCKS, EXPERT: BLOCKS},
    ),
    "Ministral-3-8B": (
        """{"activation_scheme": "static", "dequantize": false, "modules_to_not_convert":
        ["model.vision_tower", "model.multi_modal_projector", "lm_head", "model.lm_head"],
        "quant_method": "fp8", "weight_block_size": null}""",
        {Q: WHOLE, HEAD: None, "model.vision_tower.transformer.layers.0.attention.q_proj": None},
    ),
    "Meta-Llama-3.1-8B-Instruct-FP8, with old key": (
        """{"config_groups": {"group_0": {"input_activations": {"dynamic": false, "num_bits": 8, "strategy": "tensor",
        "symmetric": true, "type": "float"}, "targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "tensor",
        "symmetric": true, "type": "float"}}}, "format": "naive-quantized", "ignore": ["lm_head"],
        "quant_method": "compressed-tensors", "quantization_status": "frozen"}""",
        {Q: WHOLE, HEAD: None},
    ),
    "Qwen3-8B-FP8-dynamic": (
        """{"config_groups": {"group_0": {"input_activations": {"actorder": null, "dynamic": true, "num_bits": 8,
        "strategy": "token", "symmetric": true, "type": "float"}, "output_activations": null, "targets": ["Linear"],
        "weights": {"actorder": null, "dynamic": false, "num_bits": 8, "strategy": "channel", "symmetric": true,
        "type": "float"}}}, "format": "float-quantized", "ignore": ["lm_head"], "kv_cache_scheme": null,
        "quant_method": "compressed-tensors", "sparsity_config": {}, "transform_config": {}}""",
        {Q: ROWS, DOWN: ROWS, HEAD: None},
    ),
    "Qwen3-30B-A3B-FP8-block": (
        """{"config_groups": {"group_0": {"format": "float-quantized", "input_activations": {"dynamic": true,
        "group_size": 128, "num_bits": 8, "strategy": "group", "type": "float"}, "targets": ["Linear"],
        "weights": {"block_structure": [128, 128], "num_bits": 8, "strategy": "block", "type": "float"}}},
        "format": "float-quantized", "ignore": ["lm_head", "re:.*mlp.gate$"], "quant_method": "compressed-tensors"}""",
        {EXPERT: BLOCKS, "model.layers.3.mlp.gate": None, DENSE: BLOCKS},
    ),
    "Qwen3-8B.w8a8": (
        """{"config_groups": {"group_0": {"input_activations": {"dynamic": true, "num_bits": 8, "strategy": "token",
        "symmetric": true, "type": "int"}, "targets": ["Linear"], "weights": {"num_bits": 8, "observer": "mse",
        "strategy": "channel", "symmetric": true, "type": "int"}}}, "format": "int-quantized", "ignore": ["lm_head"],
        "quant_method": "compressed-tensors"}""",
        {Q: INT8, HEAD: None},
    ),
    "Qwen3-8B-quantized.w4a16": (
        """{"config_groups": {"group_0": {"input_activations": null, "targets": ["Linear"], "weights":
        {"actorder": "weight", "group_size": 128, "num_bits": 4, "strategy": "group", "symmetric": true,
        "type": "int"}}}, "format": "pack-quantized", "ignore": ["lm_head"], "quant_method": "compressed-tensors"}""",
        {Q: "INT4 packed along rows, groups of 128", HEAD: None},
    ),
    "Qwen3-8B-quantized.w8a16": (
        """{"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"group_size": null, "num_bits": 8,
        "strategy": "channel", "symmetric": true, "type": "int"}}}, "format": "pack-quantized",
        "ignore": ["lm_head"], "quant_method": "compressed-tensors"}""",
        {Q: "INT8 packed along rows, a scale a row"},
    ),
    "Kimi-K2-Thinking": (
        """{"config_groups": {"group_0": {"input_activations": null, "output_activations": null, "targets": ["Linear"],
        "weights": {"actorder": null, "dynamic": false, "group_size": 32, "num_bits": 4, "strategy": "group",
        "symmetric": true, "type": "int"}}}, "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*",
        "re:.*shared_experts.*", "re:.*mlp\\\\.(gate|up|gate_up|down)_proj.*"], "kv_cache_scheme": null,
        "quant_method": "compressed-tensors", "quantization_status": "compressed"}""",
        {
            EXPERT: "INT4 packed along rows, groups of 32",
            DENSE: None,
            Q: None,
            "model.layers.3.mlp.shared_experts.up_proj": None,
        },
    ),
    "two groups of their own formats": (
        """{"config_groups": {"group_0": {"format": "nvfp4-pack-quantized", "targets": ["re:.*mlp.*"],
        "input_activations": {"dynamic": "local", "group_size": 16, "num_bits": 4, "strategy": "tensor_group",
        "type": "float"}, "weights": {"group_size": 16, "num_bits": 4, "strategy": "tensor_group", "type": "float"}},
        "group_1": {"format": "float-quantized", "targets": ["Linear", "model.layers.1.mlp.down_proj"],
        "weights": {"num_bits": 8, "strategy": "channel", "type": "float"}}}, "format": "mixed-precision",
        "ignore": ["lm_head"], "quant_method": "compressed-tensors"}""",
        {Q: ROWS, DENSE: "NVFP4", DOWN: ROWS, HEAD: None},
    ),
    "Qwen3-8B-MXFP4A16": (
        """{"config_groups": {"group_0": {"format": "mxfp4-pack-quantized", "targets": ["Linear"], "weights":
        {"group_size": 32, "num_bits": 4, "scale_dtype": "torch.uint8", "strategy": "group", "type": "float"}}},
        "format": "mxfp4-pack-quantized", "ignore": ["lm_head"], "quant_method": "compressed-tensors"}""",
        {Q: "MXFP4"},
    ),
    "Qwen3-8B-AWQ": (
        """{"bits": 4, "group_size": 128, "modules_to_not_convert": null, "quant_method": "awq", "version": "gemm",
        "zero_point": true}""",
        {Q: "INT4 of AWQ, groups of 128"},
    ),
    "Qwen3-8B-GPTQ-Int4": (
        """{"bits": 4, "checkpoint_format": "gptq", "damp_percent": 0.05, "desc_act": false, "group_size": 128,
        "lm_head": false, "meta": {"quantizer": ["gptqmodel:2.2.0"]}, "quant_method": "gptq", "sym": true}""",
        {Q: "INT4 of GPTQ, groups of 128"},
    ),
    "Llama-2-7B-Chat-GPTQ": (
        """{"bits": 4, "group_size": -1, "damp_percent": 0.1, "desc_act": true, "sym": true, "true_sequential": true,
        "model_file_base_name": "model", "quant_method": "gptq"}""",
        {Q: "INT4 of GPTQ, a scale a row"},
    ),
    "GPTQ with settings of some modules": (
        """{"bits": 4, "group_size": 128, "checkpoint_format": "gptq_v2", "desc_act": false, "quant_method": "gptq",
        "dynamic": {"+:.*layers\\\\.0\\\\..*": {"bits": 8, "group_size": 64}, "-:.*down.*": {}}}""",
        {Q: "INT8 of GPTQ, groups of 64", DOWN: None, EXPERT: "INT4 of GPTQ, groups of 128"},
    ),
    "OpenHermes-2.5-Mistral-7B-marlin": (
        """{"bits": 4, "group_size": 128, "desc_act": false, "sym": true, "is_marlin_format": true,
        "quant_method": "gptq"}""",
        {Q: "INT4 of Marlin, groups of 128"},
    ),
    "Llama-3.1-8B-Instruct-FP8 of ModelOpt": (
        """{"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "ignore": ["lm_head"],
        "producer": {"name": "modelopt", "version": "0.29.0"}}""",
        {Q: WHOLE, HEAD: None},
    ),
    "Qwen3-30B-A3B-NVFP4 of ModelOpt": (
        """{"config_groups": {"group_0": {"input_activations": {"dynamic": false, "num_bits": 4, "type": "float",
        "group_size": 16}, "weights": {"dynamic": false, "num_bits": 4, "type": "float", "group_size": 16},
        "targets": ["Linear"]}}, "ignore": ["lm_head", "model.layers.*.mlp.gate"], "quant_algo": "NVFP4",
        "kv_cache_scheme": {"dynamic": false, "num_bits": 8, "type": "float"}, "quant_method": "modelopt"}""",
        {EXPERT: "NVFP4", "model.layers.30.mlp.gate": None},
    ),
    "ModelOpt with an algorithm for each module": (
        """{"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "exclude_modules": ["lm_head"],
        "quantized_layers": {"model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.layers.1.mlp.down_proj": {"quant_algo": "fp8_pb_wo"}}}""",
        {Q: WHOLE, DOWN: BLOCKS, DENSE: None, HEAD: None},
    ),
}
"""Configurations as published, shortened, and formats of modules; None for those that stay as they are."""

COMPRESSED: dict[str, Any] = json.loads(READ["Qwen3-8B-quantized.w4a16"][0])
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"weights in 'bitsandbytes' are not supported, only fp8,"),
    ({"quant_method": "hqq"}, r"weights in 'hqq'"),
    ({"quant_method": "quark", "global_quant_config": {}}, r"weights in 'quark'"),
    ({"quant_method": "fbgemm_fp8"}, r"weights in 'fbgemm_fp8'"),
    ({"quant_method": "torchao"}, r"weights in 'torchao'"),
    ({"quant_method": "auto-round", "bits": 4}, r"weights in 'auto-round'"),
    ({"quant_method": "mxfp4"}, r"weights in 'mxfp4'"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, r"fmt = 'e5m2' is not supported, only 'e4m3'"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size = \[128\], a list of rows and columns"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, r"version = 'gemv' of AWQ is not supported, only 'gemm'"),
    ({"quant_method": "awq", "bits": 4, "version": "marlin"}, r"version = 'marlin' of AWQ"),
    ({"quant_method": "awq", "bits": 8}, r"bits = 8 of AWQ is not supported, only 4"),
    ({"quant_method": "gptq", "bits": 3, "group_size": 128}, r"bits = 3 of GPTQ is not supported, only 4 or 8"),
    (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "pack_dtype": "int16"},
        r"pack_dtype = 'int16' is not supported, only 'int32'",
    ),
    ({"quant_method": "awq", "bits": 4, "format": "gemv_fast"}, r"version = 'gemv_fast' of AWQ is not supported"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 0}, r"group_size = 0, a number of elements is needed, or -1"),
    ({"quant_method": "gptq", "bits": 4}, r"group_size = None, a whole number is needed"),
    (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "bitblas"},
        r"checkpoint_format = 'bitblas' is not supported, only 'gptq', 'gptq_v2' or 'marlin'",
    ),
    (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"+:(": {}}},
        r"'\(' is no regular expression",
    ),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, r"quant_algo = 'W4A8_AWQ' is not supported, only FP8 or"),
    (COMPRESSED | {"transform_config": {"config_groups": {"R1": {}}}}, r"transform_config, rotations of activations"),
    (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"format = 'sparse-24-bitmask' is not"),
    (COMPRESSED | {"format": "marlin-24"}, r"format 'marlin-24' of weights in int of 4 bits is not supported"),
    (COMPRESSED | {"config_groups": {}}, r"config_groups = \{\} is not supported"),
    (
        COMPRESSED | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 3}}}},
        r"group_0: format 'pack-quantized' of weights in int of 3 bits is not supported",
    ),
    (
        COMPRESSED
        | {"config_groups": {"group_0": {"targets": ["re:.*k_proj"], "output_activations": {"num_bits": 8}}}},
        r"output_activations are not supported",
    ),
]


@pytest.mark.parametrize("name", READ)
def test_a_published_configuration_gives_the_format_of_each_module(name: str) -> None:
    text, expected = READ[name]
    quantization = read_quantization({"quantization_config": json.loads(text)}, "config.json")
    assert quantization is not None
    formats = formats_of(quantization, [[module] for module in expected])
    assert [format_ and format_.label for format_ in formats] == list(expected.values())


@pytest.mark.parametrize(("table", "message"), REFUSED)
def test_what_nobody_reads_is_refused_with_key_and_value(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=rf"^x/config\.json: quantization_config.*{message}"):
        read_quantization({"quantization_config": table}, "x/config.json")


@pytest.mark.parametrize(
    "table",
    [
        COMPRESSED | {"ignore": ["re:a{1}"] * 5000},
        json.loads(READ["Qwen3-8B-GPTQ-Int4"][0]) | {"dynamic": {f"-:a{i}": {} for i in range(5000)}},
    ],
)
def test_more_expressions_than_a_model_needs_are_refused(table: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"5000 expressions for names of modules are .*, only 4096 or fewer"):
        read_quantization({"quantization_config": table}, "config.json")


def test_a_number_of_repetitions_too_large_to_compile_is_refused() -> None:
    with pytest.raises(ModelError, match=r"is no regular expression \(the repetition number is too large\)"):
        read_quantization({"quantization_config": COMPRESSED | {"ignore": ["re:a{99999999999}"]}}, "config.json")


def test_an_expression_that_backtracks_without_end_is_refused_by_name() -> None:
    table = COMPRESSED | {"ignore": ["re:.*gate$", r"re:(\w+\.?)+!", "re:.*head"]}
    quantization = read_quantization({"quantization_config": table}, "x/config.json")
    assert quantization is not None
    with pytest.raises(
        ModelError, match=r"^x/config\.json.*\(.*!', compared with 2 names .* takes more than 1 s; write"
    ):
        formats_of(quantization, [[Q], [EXPERT]], limit_s=1)


def test_the_first_rule_that_matches_holds_whether_it_is_a_name_or_an_expression() -> None:
    rules = [f"model.layers.{layer}.mlp.gate" for layer in range(3)] + ["model.layers.0.self_attn*", "lm_head"]
    table = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": rules}
    quantization = read_quantization({"quantization_config": table}, "config.json")
    assert quantization is not None
    assert [rule.match for rule in quantization.rules if rule.match in EXPRESSIONS] == [Match.WILDCARD]
    names = (Q, "lm_head", "model.layers.2.mlp.gate", DENSE, "model.layers.20.mlp.gate")
    found = formats_of(quantization, [[name] for name in names])
    assert [format_ and format_.label for format_ in found] == [None] * 3 + [WHOLE] * 2


@pytest.mark.parametrize(
    "content", [5, "fp8", [1], {"quant_method": 5}, {"config_groups": 5}, {"config_groups": {"a": 5}}]
)
def test_a_table_that_is_none_is_refused(content: object) -> None:
    with pytest.raises(ModelError, match=r"^config\.json: quantization_config"):
        read_quantization({"quantization_config": content}, "config.json")


def test_a_checkpoint_without_a_table_is_plain() -> None:
    assert read_quantization({"quantization_config": None, "hidden_size": 4}, "config.json") is None


@pytest.mark.parametrize(
    ("name", "content", "label"),
    [
        ("hf_quant_config.json", {"producer": {}, "quantization": {"quant_algo": "FP8"}}, WHOLE),
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False}, "INT4 of GPTQ, groups of 128"),
        ("quantize_config.json", {"w_bit": 4, "q_group_size": 64, "version": "GEMM"}, "INT4 of AWQ, groups of 64"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "zero_point": True}, "INT4 of AWQ, groups of 128"),
    ],
)
def test_files_beside_config_json_are_read_where_it_says_nothing(
    name: str, content: dict[str, Any], label: str, tmp_path: Path
) -> None:
    write_checkpoint("qwen3-tied", tmp_path)
    (tmp_path / name).write_text(json.dumps(content))
    quantization = read_config(tmp_path).quantization
    assert quantization is not None and quantization.where == str(tmp_path / name)
    [format_] = formats_of(quantization, [[Q]])
    assert format_ is not None and format_.label == label
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": json.loads(READ["Qwen3-8B-FP8"][0])})
    )
    first = read_config(tmp_path).quantization
    assert first is not None and first.method == "fp8"


@pytest.mark.parametrize("content", ["[]", "{", '{"quantization": 5}'])
def test_a_broken_file_beside_config_json_is_named(content: str, tmp_path: Path) -> None:
    write_checkpoint("qwen3-tied", tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"hf_quant_config\.json: .*fetch the model again"):
        Settings.read(tmp_path)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["Linear", "re:(", -1]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
PUBLISHED = [json.loads(text) for text, _ in READ.values()]
KEYS = sorted({key for table in PUBLISHED for key in table} | {"pack_dtype", "quantized_layers", "w_bit"})
OF_WEIGHTS = sorted(set(COMPRESSED["config_groups"]["group_0"]["weights"]) | {"block_structure"})


@pytest.mark.medium
@given(table=st.sampled_from(PUBLISHED), key=st.sampled_from(KEYS), value=JSON, inner=st.sampled_from(OF_WEIGHTS))
@settings(max_examples=600)
def test_whatever_a_table_says_it_is_read_or_refused(
    table: dict[str, Any], key: str, value: object, inner: str
) -> None:
    """Values change in the table, and in the weights of its group if it has one."""
    changed: list[dict[str, Any]] = [table | {key: value}]
    if group := table.get("config_groups", {}).get("group_0"):
        changed.append(table | {"config_groups": {"a": group | {"weights": group["weights"] | {inner: value}}}})
        changed.append(table | {"config_groups": {"a": group | {inner: value, "targets": value}}})
    for each in changed:
        try:
            quantization = read_quantization({"quantization_config": each}, "x/config.json")
        except ModelError as error:
            assert str(error).startswith("x/config.json: ") and len(str(error)) < 600
        else:
            assert quantization is not None
            for format_ in {rule.format for rule in quantization.rules if rule.format is not None}:
                try:
                    fields = format_.fields(256, 512)
                except ValueError as error:
                    assert "is needed" in str(error)
                else:
                    assert all(size > 0 for field in fields for size in field.shape)
