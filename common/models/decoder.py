"""A decoder: layers of attention and a gated MLP, pre-norm, whose differences are data."""

from collections.abc import Mapping

from torch import Tensor

from common.models.base import Task, rope_table
from common.models.config import DecoderConfig, Layer
from common.models.layers import AttentionPart, MLPPart, stream
from common.ops.base import AttentionWeights, ForwardBatch, Norm, Ops, Residual, Weight


class Decoder:
    """Weights and the forward pass over them; a `Model`.

    Args:
        tensors: as named by `DecoderConfig.pieces`, all on the same device and of the same dtype.
        max_positions: longest sequence served, in tokens.
    """

    def __init__(self, config: DecoderConfig, tensors: Mapping[str, Tensor], max_positions: int) -> None:
        self.config = config
        self.embed = Weight(tensors["embed"])
        self.norm = Norm(tensors["norm"], config.norm_eps)
        self.lm_head = self.embed if config.tied_embeddings else Weight(tensors["lm_head"])
        self._ropes: dict[tuple[float, ...], Tensor] = {}
        self._max_positions = max_positions
        self.layers = [
            (self._attention(tensors, number, layer), self._mlp(tensors, number))
            for number, layer in enumerate(config.layers)
        ]
        first = {layer: number for number, layer in reversed(list(enumerate(config.layers)))}
        self._distinct = [self.layers[number] for number in first.values()]

    def forward(self, batch: ForwardBatch, ops: Ops) -> Tensor:
        return self.logits(self.hidden(batch, ops), ops)

    def logits(self, x: Residual, ops: Ops) -> Tensor:
        return ops.logits(x, self.norm, self.lm_head)

    def hidden(self, batch: ForwardBatch, ops: Ops) -> Residual:
        batch = ops.begin(batch)
        x, last = self.embedded(batch.token_ids, ops), self.layers[-1][0]
        for attention, mlp in self.layers:
            of_last = attention is last and batch.last_tokens is not None  # of other tokens only K and V are needed
            x = mlp.forward(attention.forward(x, batch, ops, of_last=of_last), ops)
        return x

    def embedded(self, token_ids: Tensor, ops: Ops) -> Residual:
        return ops.embed(token_ids, self.embed)

    def zeros(self, num_tokens: int) -> Residual:
        return stream(self.lm_head, num_tokens)

    def attention_tasks(self, ops: Ops, batch: ForwardBatch, *, of_last: bool = False) -> list[Task]:
        def task(part: AttentionPart) -> Task:
            return lambda: part.attend(ops, batch, of_last=of_last)

        return [task(attention) for attention, _ in self._distinct]

    def product_tasks(self, ops: Ops, num_tokens: int) -> list[Task]:
        return [
            task
            for attention, mlp in self._distinct
            for task in (*attention.product_tasks(ops, num_tokens, mlp), *mlp.product_tasks(ops, num_tokens, attention))
        ]

    def _attention(self, tensors: Mapping[str, Tensor], number: int, layer: Layer) -> AttentionPart:
        prefix, attention = f"layers.{number}", layer.attention
        return AttentionPart(
            norm=Norm(tensors[f"{prefix}.attention_norm"], self.config.norm_eps),
            qkv=Weight(tensors[f"{prefix}.qkv"]),
            attention=AttentionWeights(
                q_norm=tensors.get(f"{prefix}.q_norm"),
                k_norm=tensors.get(f"{prefix}.k_norm"),
                norm_eps=self.config.norm_eps,
                rope=self._rope(attention.inverse_frequencies),
                num_q_heads=attention.heads.num_q_heads,
                num_kv_heads=attention.heads.num_kv_heads,
                head_dim=attention.heads.head_dim,
                bias=tensors.get(f"{prefix}.qkv_bias"),
                group=self.config.heads.index(attention.heads),
            ),
            o=Weight(tensors[f"{prefix}.o"]),
            layer_id=[each.attention.heads for each in self.config.layers[:number]].count(attention.heads),
        )

    def _mlp(self, tensors: Mapping[str, Tensor], number: int) -> MLPPart:
        prefix = f"layers.{number}"
        return MLPPart(
            norm=Norm(tensors[f"{prefix}.mlp_norm"], self.config.norm_eps),
            gate_up=Weight(tensors[f"{prefix}.gate_up"]),
            down=Weight(tensors[f"{prefix}.down"]),
        )

    def _rope(self, inverse_frequencies: tuple[float, ...]) -> Tensor:
        """Return the rotary table; layers with equal frequencies share it."""
        if inverse_frequencies not in self._ropes:
            table = rope_table(inverse_frequencies, self._max_positions, self.embed.data.device)
            self._ropes[inverse_frequencies] = table
        return self._ropes[inverse_frequencies]
