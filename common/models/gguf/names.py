"""Places of a model's tensors in a GGUF file. Needs no torch."""

import re
from typing import NamedTuple

from common.models.sizes.stacks import Order, Piece

WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
LAYER = re.compile(r"model\.layers\.(?P<number>\d+)\.(?P<part>.+)\.(?P<kind>weight|bias)")
EXPERT = re.compile(r"mlp\.experts\.(?P<number>\d+)\.(?P<side>gate|up|down)_proj")
TURNED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")


class Place(NamedTuple):
    """Tensor of a GGUF file, and the matrix of a stacked one."""

    name: str
    expert: int | None = None


def place_of(name: str) -> Place:
    """Return where a GGUF file has the tensor of this name in safetensors; raises KeyError for a name without place."""
    if name in WHOLE:
        return Place(WHOLE[name])
    found = LAYER.fullmatch(name)
    if found is None:
        raise KeyError(name)
    prefix = f"blk.{found['number']}"
    expert = EXPERT.fullmatch(found["part"])
    if expert is not None:
        return Place(f"{prefix}.ffn_{expert['side']}_exps.{found['kind']}", int(expert["number"]))
    return Place(f"{prefix}.{IN_LAYER[found['part']]}.{found['kind']}")


def turned_back(piece: Piece, head_dim: int) -> Piece:
    """Return a piece of Q or K whose rows stand in the file as neighbours that turn together; other pieces unchanged.

    A model turns the first half of a head with the second half. So rows 2i and 2i + 1 of a head in the file are its
    rows i and head_dim / 2 + i.
    """
    if not piece.checkpoint_name.endswith(TURNED):
        return piece
    rows, width = piece.shape
    view = (rows // head_dim, 2, head_dim // 2, width)
    return piece._replace(order=Order(piece.shape, view, (0, 2, 1, 3)))
