"""A decoder: layers of a mixer of tokens and an MLP, whose differences are data."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from common.models.base import Task, query_factors, rope_table
from common.models.config import MLP, DecoderConfig
from common.models.layers.attention import AttentionPart, attention_part
from common.models.layers.delta_rule import DeltaPart, delta_part
from common.models.layers.experts import ExpertsPart, experts_part
from common.models.layers.latent import LatentPart, latent_part
from common.models.layers.mlp import MLPPart, mlp_part
from common.models.layers.parallel_experts import ParallelExpertsPart, parallel_experts_part
from common.models.layers.tasks import stream
from common.models.layers.tensors import LayerTensors, weight_of
from common.models.sizes.attention import Attention
from common.models.sizes.experts import Experts
from common.models.sizes.latent import Latent
from common.models.sizes.mlp import GatedMLP
from common.models.sizes.parallel_experts import ParallelExperts
from common.models.sizes.rope import Rope
from common.ops.base import ForwardBatch, Norm, Ops, Residual, Weight

MixerPart = AttentionPart | LatentPart | DeltaPart
FeedForward = MLPPart | ExpertsPart | ParallelExpertsPart
Part = MixerPart | FeedForward


class Decoder:
    """Weights and the forward pass over them; a `Model`.

    Args:
        tensors: as named by `DecoderConfig.stacks`, all on the same device.
        max_positions: longest sequence served, in tokens.
    """

    def __init__(self, config: DecoderConfig, tensors: Mapping[str, Tensor], max_positions: int) -> None:
        self.config, self._tensors = config, tensors
        self.embed = Weight(tensors["embed"])
        self.norm = Norm(tensors["norm"], config.norm_eps)
        self._forms = {name: stack.form for name, stack in config.stacks().items() if stack.form is not None}
        self.lm_head = weight_of(tensors, self._forms, "lm_head") if config.has_own_head else self.embed
        self._ropes: dict[tuple[Rope, int], tuple[Tensor, Tensor | None]] = {}
        self._max_positions = max_positions
        self.layers = [self._layer(tensors, number) for number in range(len(config.layers))]
        self._chooses = any(not isinstance(layer.mlp, GatedMLP) for layer in config.layers)
        first = {layer: number for number, layer in reversed(list(enumerate(config.layers)))}
        self._distinct = [self.layers[number] for number in first.values()]

    def forward(self, batch: ForwardBatch, ops: Ops) -> Tensor:
        return self.logits(self.hidden(batch, ops), ops)

    def logits(self, x: Residual, ops: Ops) -> Tensor:
        return ops.logits(x, self.norm, self.lm_head, self.config.logit_cap)

    def hidden(self, batch: ForwardBatch, ops: Ops) -> Residual:
        batch = ops.begin(batch)
        x, last = self.embedded(batch.token_ids, ops), self.layers[-1][0]
        present = batch.present() if self._chooses else batch.seq_lens
        for mixer, mlp in self.layers:
            of_last = mixer is last and batch.last_tokens is not None  # of other tokens only the cache is needed
            x = mlp.forward(mixer.forward(x, batch, ops, of_last=of_last), ops, batch.seq_lens if of_last else present)
        return x

    def embedded(self, token_ids: Tensor, ops: Ops) -> Residual:
        return ops.embed(token_ids, self.embed, self.config.embed_scale)

    def zeros(self, num_tokens: int) -> Residual:
        return stream(self.lm_head, num_tokens)

    def mxfp4_weights(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        for name, stack in self.config.stacks().items():
            if stack.dtype == "uint8" and name.endswith("_scales"):
                values = self._tensors[name.removesuffix("_scales")]
                yield stack.pieces[0].checkpoint_name, values, self._tensors[name]

    def attention_tasks(self, ops: Ops, batch: ForwardBatch, *, of_last: bool = False) -> list[Task]:
        def task(part: MixerPart) -> Task:
            return lambda: part.attend(ops, batch, of_last=of_last)

        return [task(mixer) for mixer, _ in self._distinct]

    def product_tasks(self, ops: Ops, num_tokens: int) -> list[Task]:
        def behind(part: Part, then: Part) -> Task:
            return lambda: then.first_product(ops, part.zeros(ops, num_tokens))

        tasks = []
        for mixer, mlp in self._distinct:
            tasks += [*mixer.product_tasks(ops, num_tokens), *mlp.product_tasks(ops, num_tokens)]
            tasks += [behind(mixer, mlp), behind(mlp, mixer)]
        return tasks

    def _layer(self, tensors: Mapping[str, Tensor], number: int) -> tuple[MixerPart, FeedForward]:
        """Build a layer; its mixer knows the layer's place in the cache of its group."""
        layer, of_layer = self.config.layers[number], LayerTensors(tensors, self._forms, number, self.config.norm_eps)
        mixer, before = layer.mixer, self.config.layers[:number]
        layer_id = [each.mixer.group for each in before].count(mixer.group)
        group = [each.group for each in self.config.groups].index(mixer.group)
        mlp = _feed_forward(layer.mlp, of_layer)
        if isinstance(mixer, Attention):
            return attention_part(mixer, of_layer, group, layer_id, *self._rope(mixer)), mlp
        if isinstance(mixer, Latent):
            return latent_part(mixer, of_layer, group, layer_id, *self._rope(mixer)), mlp
        return delta_part(mixer, of_layer, group, layer_id), mlp

    def _rope(self, attention: Attention | Latent) -> tuple[Tensor, Tensor | None]:
        """Return the rotary table and the factors of queries; layers with equal rotations share them."""
        key = (attention.rope, attention.rope_dim)
        if key not in self._ropes:
            device = self.embed.data.device
            table = rope_table(*key, self._max_positions, device)
            self._ropes[key] = table, query_factors(attention.rope, self._max_positions, device)
        return self._ropes[key]


def _feed_forward(mlp: MLP, tensors: LayerTensors) -> FeedForward:
    if isinstance(mlp, Experts):
        return experts_part(mlp, tensors)
    return parallel_experts_part(mlp, tensors) if isinstance(mlp, ParallelExperts) else mlp_part(mlp, tensors)
