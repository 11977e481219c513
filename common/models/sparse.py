"""Reading of layers of experts: the keys of config.json common to Qwen's families."""

from common.base.errors import ModelError
from common.base.routing import Route
from common.models.config import MLP
from common.models.settings import MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH, Settings
from common.models.sizes.experts import ExpertNames, Experts
from common.models.sizes.mlp import GatedMLP

GATED_SHARED = ExpertNames(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")


def read_experts(settings: Settings, *, renormalizes: bool, has_shared: bool = False) -> Experts:
    """Return the sizes of a layer's experts; raises ModelError if a shared MLP is not as wide as some experts."""
    key = "num_local_experts" if settings.values.get("num_experts") is None else "num_experts"  # both are in use
    num = settings.count(key, MAX_EXPERTS)
    per_token = settings.count("num_experts_per_tok", num)
    inner = settings.count("moe_intermediate_size", MAX_WIDTH)
    experts = Experts(num, inner, Route(per_token, renormalizes=renormalizes))
    if not has_shared:
        return experts
    return Experts(num, inner, experts.route, num_shared=_num_shared(settings, inner), names=GATED_SHARED)


def _num_shared(settings: Settings, inner: int) -> int:
    width = settings.count("shared_expert_intermediate_size", MAX_WIDTH)
    if width % inner:
        raise ModelError(
            f"{settings.where}: shared_expert_intermediate_size = {width}, a multiple of moe_intermediate_size = "
            f"{inner} is needed; serve another checkpoint"
        )
    return width // inner


def sparse_layers(settings: Settings, experts: Experts) -> list[MLP]:
    """Return experts, or an MLP where config.json says so, for each layer."""
    count, alone = settings.count("num_hidden_layers", MAX_LAYERS), settings.values.get("mlp_only_layers") or []
    if not isinstance(alone, list) or not all(type(each) is int for each in alone):
        raise ModelError(f"{settings.where}: mlp_only_layers = {alone!r:.80}, a list of numbers of layers is needed")
    step = settings.count("decoder_sparse_step", MAX_LAYERS, 1)
    is_sparse = [layer not in alone and (layer + 1) % step == 0 for layer in range(count)]
    if all(is_sparse):
        return [experts] * count
    mlp = GatedMLP(settings.count("intermediate_size", MAX_WIDTH))
    return [experts if sparse else mlp for sparse in is_sparse]
