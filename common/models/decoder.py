"""A decoder: layers of a mixer of tokens and a gated MLP, pre-norm, whose differences are data."""

from collections.abc import Mapping

from torch import Tensor

from common.models.base import Task, rope_table
from common.models.config import DecoderConfig, group_key
from common.models.layers import AttentionPart, DeltaPart, MixerPart, MLPPart, stream
from common.models.mixers import Attention
from common.ops.base import AttentionWeights, DeltaWeights, ForwardBatch, Norm, Ops, Residual, Weight


class Decoder:
    """Weights and the forward pass over them; a `Model`.

    Args:
        tensors: as named by `DecoderConfig.stacks`, all on the same device.
        max_positions: longest sequence served, in tokens.
    """

    def __init__(self, config: DecoderConfig, tensors: Mapping[str, Tensor], max_positions: int) -> None:
        self.config = config
        self.embed = Weight(tensors["embed"])
        self.norm = Norm(tensors["norm"], config.norm_eps)
        self.lm_head = self.embed if config.tied_embeddings else Weight(tensors["lm_head"])
        self._ropes: dict[tuple[tuple[float, ...], int], Tensor] = {}
        self._max_positions = max_positions
        self.layers = [
            (self._mixer(tensors, number), self._mlp(tensors, number)) for number in range(len(config.layers))
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
        for mixer, mlp in self.layers:
            of_last = mixer is last and batch.last_tokens is not None  # of other tokens only the cache is needed
            x = mlp.forward(mixer.forward(x, batch, ops, of_last=of_last), ops)
        return x

    def embedded(self, token_ids: Tensor, ops: Ops) -> Residual:
        return ops.embed(token_ids, self.embed)

    def zeros(self, num_tokens: int) -> Residual:
        return stream(self.lm_head, num_tokens)

    def attention_tasks(self, ops: Ops, batch: ForwardBatch, *, of_last: bool = False) -> list[Task]:
        def task(part: MixerPart) -> Task:
            return lambda: part.attend(ops, batch, of_last=of_last)

        return [task(mixer) for mixer, _ in self._distinct]

    def product_tasks(self, ops: Ops, num_tokens: int) -> list[Task]:
        return [
            task
            for mixer, mlp in self._distinct
            for task in (*mixer.product_tasks(ops, num_tokens, mlp), *mlp.product_tasks(ops, num_tokens, mixer))
        ]

    def _mixer(self, tensors: Mapping[str, Tensor], number: int) -> MixerPart:
        """Build what mixes tokens in a layer, with the layer's place in the cache of its group."""
        mixer = self.config.layers[number].mixer
        key = group_key(mixer)
        layer_id = [group_key(each.mixer) for each in self.config.layers[:number]].count(key)
        group, prefix = self.config.groups.index(key), f"layers.{number}"
        norm = Norm(tensors[f"{prefix}.attention_norm"], self.config.norm_eps)
        if isinstance(mixer, Attention):
            weights = self._attention(mixer, tensors, prefix, group)
            gate = Weight(tensors[f"{prefix}.gate"]) if mixer.has_gate else None
            return AttentionPart(
                norm, Weight(tensors[f"{prefix}.qkv"]), weights, Weight(tensors[f"{prefix}.o"]), layer_id, gate
            )
        delta = DeltaWeights(
            conv=tensors[f"{prefix}.conv"],
            decay=tensors[f"{prefix}.decay"],
            dt_bias=tensors[f"{prefix}.dt_bias"],
            norm=tensors[f"{prefix}.delta_norm"],
            norm_eps=self.config.norm_eps,
            num_key_heads=mixer.num_key_heads,
            num_value_heads=mixer.num_value_heads,
            key_dim=mixer.key_dim,
            value_dim=mixer.value_dim,
            group=group,
        )
        inputs, out = Weight(tensors[f"{prefix}.delta_in"]), Weight(tensors[f"{prefix}.delta_out"])
        return DeltaPart(norm, inputs, delta, out, layer_id)

    def _attention(
        self, attention: Attention, tensors: Mapping[str, Tensor], prefix: str, group: int
    ) -> AttentionWeights:
        return AttentionWeights(
            q_norm=tensors.get(f"{prefix}.q_norm"),
            k_norm=tensors.get(f"{prefix}.k_norm"),
            norm_eps=self.config.norm_eps,
            rope=self._rope(attention),
            num_q_heads=attention.heads.num_q_heads,
            num_kv_heads=attention.heads.num_kv_heads,
            head_dim=attention.heads.head_dim,
            bias=tensors.get(f"{prefix}.qkv_bias"),
            group=group,
        )

    def _mlp(self, tensors: Mapping[str, Tensor], number: int) -> MLPPart:
        prefix = f"layers.{number}"
        return MLPPart(
            norm=Norm(tensors[f"{prefix}.mlp_norm"], self.config.norm_eps),
            gate_up=Weight(tensors[f"{prefix}.gate_up"]),
            down=Weight(tensors[f"{prefix}.down"]),
        )

    def _rope(self, attention: Attention) -> Tensor:
        """Return the rotary table; layers with equal frequencies share it."""
        key = (attention.inverse_frequencies, attention.heads.head_dim)
        if key not in self._ropes:
            self._ropes[key] = rope_table(*key, self._max_positions, self.embed.data.device)
        return self._ropes[key]
