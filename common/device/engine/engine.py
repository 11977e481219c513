"""The device side of a worker: a device, a model, a pool of KV blocks, and the operations between them.

Building takes seconds, with progress in the log.
"""

import importlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import torch

from common.base.errors import ConfigError, ModelError
from common.base.log import StartLog
from common.device.engine.mxfp4_limits import check_scales
from common.device.engine.pool_budget import pool_shape
from common.device.engine.served_model import served_model
from common.device.engine.weights_memory import ServedWeights
from common.kernels.base.attention_operands import HEAD_DIMS
from common.kernels.base.gpu import MIN_CAPABILITY, gpu_of
from common.kernels.base.latent_operands import MIN_DIM, are_computed
from common.kernels.base.sampling_operands import MAX_VOCAB
from common.kv.blocks import Allocator
from common.kv.pool import KVPool
from common.kv.transport import Transport, make_transport
from common.memory.base.pattern import pattern
from common.memory.client.client import MemoryClient
from common.memory.client.mapping import Mapping
from common.memory.client.shared_pool import SharedPool
from common.models.base import Model, ModelConfig
from common.models.loader import (
    load_model,
    resolve_dtype,
    resolve_kv_dtype,
    resolve_max_len,
    with_cache_scales,
)
from common.ops.base import GroupCache, Ops
from common.ops.sampler import Sampler
from common.settings.config import Config, KernelsSection
from common.wire.values.fingerprint import chosen_fingerprint, held_fingerprint, model_fingerprint
from common.wire.values.kv_layout import E4M3, KVLayout
from common.wire.values.pool_shape import PoolShape, shown

logger = logging.getLogger(__name__)

ATTENTION = ("rope", "prefill_attention", "decode_attention")
"""Families of kernels that compute attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Everything on the device, built once."""

    device: torch.device
    model: Model
    model_fingerprint: str  # that of the router; the pool's layout has that of what is held
    ops: Ops
    step_ops: Ops  # for decode steps, captured in graphs
    pdl: bool  # kernels of a decode step start before their predecessors end
    sampler: Sampler
    pool: KVPool
    allocator: Allocator
    shared: SharedPool
    transport: Transport
    max_len: int  # tokens
    graph_safe: bool  # a decode step may be captured in a CUDA graph

    def leave(self) -> None:
        """Give this worker's free leased blocks to other workers; launch nothing afterwards."""
        self.shared.leave()

    @property
    def vocab_size(self) -> int:
        """Upper limit of token ids, exclusive."""
        return self.model.config.vocab_size


def build_engine(
    config: Config,
    memory: MemoryClient,
    *,
    step_tokens: int,
    logit_rows: int,
    meanwhile: Callable[[Engine], None] = lambda engine: None,
    start: StartLog | None = None,
) -> Engine:
    """Load the model and claim the pool.

    Args:
        memory: the device's memory server, owner of the weights and the pool.
        step_tokens: most tokens of a step.
        logit_rows: most rows of logits of a step.
        meanwhile: called with the engine while weights are still being written; results computed then are void.
        start: told what of the worker's start is over.
    """
    start = start or StartLog()
    _import_ahead(config)
    device = resolve_device(config.worker.device)
    if device.type == "cpu" and config.worker.num_threads:
        torch.set_num_threads(config.worker.num_threads)
    model_dir = Path(config.model.path)
    model_config = served_model(config, device)
    if device.type == "cuda":
        check_model(config.kernels, model_config)
    dtype = resolve_dtype(config.model.dtype, model_config, device)
    max_len = resolve_max_len(config.model, model_config)
    kv_dtype = resolve_kv_dtype(config.kv.dtype, model_config, dtype, device)
    if kv_dtype == E4M3:
        model_config = with_cache_scales(model_config, model_dir)
    groups = model_config.cache_groups(config.kv.block_size, kv_dtype)
    fingerprint = model_fingerprint(model_dir)
    layout = KVLayout(held_fingerprint(fingerprint, model_config.codes), groups)
    weights = ServedWeights(memory, layout.fingerprint, device, LoadProgress())
    model, loading = load_model(model_dir, model_config, max_len=max_len, dtype=dtype, memory=weights)
    with loading:
        wanted = pool_shape(config, model_config, layout, device, max_len)
        pool, shared = claimed_pool(memory, wanted, device)
        _log_pool(config, pool, device, wanted, dtype)
        pdl = launches_early(config, device)
        ops, step_ops, graph_safe = make_ops(config, model_config, pool, device, logit_rows)
        sampling = config.kernels.sampling if device.type == "cuda" else "torch"
        engine = Engine(
            device=device,
            model=model,
            model_fingerprint=chosen_fingerprint(fingerprint, config.model.quantization, config.model.head),
            ops=ops,
            step_ops=step_ops,
            pdl=pdl,
            sampler=Sampler(sampling, logit_rows, model_config.vocab_size, device, pdl=pdl),
            pool=pool,
            allocator=shared.leases,
            shared=shared,
            transport=make_transport(config.kv.transport, device),
            max_len=min(max_len, pool.shape.most_tokens(step_tokens)),
            graph_safe=graph_safe,
        )
        start.ended("device and pool")
        meanwhile(engine)
        start.ended("kernels")
        loading.wait()
    if device.type == "cuda" and dtype == "bfloat16" and config.kernels.experts == "triton":
        check_scales(model)
    start.ended("weights")
    return engine


def launches_early(config: Config, device: torch.device) -> bool:
    """Tell whether kernels of a decode step start before their predecessors end: if enabled and supported."""
    wanted = config.kernels.pdl and config.worker.cuda_graphs
    return wanted and device.type != "cpu" and gpu_of(device).has_dependent_launch


def _import_ahead(config: Config) -> None:
    """Begin a second of imports while the GPU makes a context; later imports of the same modules wait."""
    if config.worker.device != "cpu" and torch.cuda.is_available():
        Thread(target=importlib.import_module, args=("common.device.steps.kernel_code",), daemon=True).start()


def _log_pool(config: Config, pool: KVPool, device: torch.device, wanted: PoolShape, dtype: str) -> None:
    shape = pool.shape
    logger.info(
        "%s on %s in %s; KV pool in %s of %s blocks%s, %d tokens, %.2f GB",
        config.model.served_name,
        device,
        dtype,
        shape.layout.groups[0].dtype,
        shown(shape.num_blocks),
        "" if len(shape.num_blocks) == 1 else f" for texts of usual length, in {shape.slabs.num_slabs} slabs",
        shape.layout.most_tokens(shape.capacity, 1),
        shape.num_bytes / 1e9,
    )
    if (shape.num_blocks, shape.floor) != (wanted.num_blocks, wanted.floor):
        logger.warning(
            "another worker made this pool; the settings of this one would make %s blocks, so that there may be too "
            "little memory beside it: give all workers of a device the same [model], [prefill], [decode] and [kv]",
            shown(wanted.num_blocks),
        )


def resolve_device(choice: str) -> torch.device:
    """Resolve a device name; `auto` takes the current GPU if any. Raises ConfigError for a missing or old GPU."""
    if choice == "auto":
        choice = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(choice)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"worker.device = {choice!r}: auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    index = device.index or 0
    if index >= count:
        raise ConfigError(f"worker.device = {choice!r}: this process sees {count} GPUs")
    torch.cuda.set_device(index)
    device = torch.device("cuda", index)
    gpu = gpu_of(device)
    if gpu.capability < MIN_CAPABILITY:
        has, needed = (".".join(map(str, capability)) for capability in (gpu.capability, MIN_CAPABILITY))
        raise ConfigError(
            f"worker.device = {choice!r}: the {gpu.name} has compute capability {has}, kernels need {needed} or newer; "
            'use another GPU, or worker.device = "cpu"'
        )
    return device


def describe_device(device: torch.device) -> tuple[str, str]:
    """Return (text for people, UUID of the GPU or "")."""
    if device.type == "cpu":
        return "cpu", ""
    properties = torch.cuda.get_device_properties(device)
    return f"{device} {properties.name}", str(properties.uuid)


class LoadProgress:
    """Log of the progress of loading weights, at most twice a second."""

    def __init__(self) -> None:
        self.begin_s = self.said_s = time.monotonic()

    def __call__(self, loaded_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        if loaded_bytes == total_bytes or now_s - self.said_s > 0.5:
            self.said_s = now_s
            logger.info(
                "loading weights: %3d%% of %.2f GB, %.1f s",
                100 * loaded_bytes // total_bytes,
                total_bytes / 1e9,
                now_s - self.begin_s,
            )


def make_ops(
    config: Config, model: ModelConfig, pool: KVPool, device: torch.device, max_rows: int
) -> tuple[Ops, Ops, bool]:
    """Return ops for prompts, ops for decode steps, and whether decode steps may be captured."""
    groups = zip(pool.caches, model.q_heads, pool.shape.layout.groups, strict=True)
    caches = [GroupCache(cache, num_q_heads, group.window) for cache, num_q_heads, group in groups]
    if device.type == "cpu":
        from common.ops.torch_ops import TorchOps

        ops = TorchOps(caches)
        return ops, ops, False
    from common.ops.cuda_ops import CudaOps
    from common.ops.linear_plan import PromptPlans

    step_ops = CudaOps(caches, config.kernels, max_rows, pdl=launches_early(config, device))
    graph_safe = step_ops.graph_safe and config.kernels.sampling == "triton"
    prompt_ops = CudaOps(caches, config.kernels, max_rows)
    prompt_ops.plans = PromptPlans(prompt_ops.plans)
    return prompt_ops, step_ops, graph_safe


def claimed_pool(client: MemoryClient, wanted: PoolShape, device: torch.device) -> tuple[KVPool, SharedPool]:
    """Return the pool shared by all workers of the layout and this worker's part, with a block at hand.

    The first worker sets the shape. Raises ConfigError or MemoryLost.
    """
    claim = client.claim_pool(wanted.layout, wanted.num_blocks, wanted.floor)
    mapping, shape = Mapping(claim, device), claim.shape
    pool = KVPool(shape, mapping.tensor(writable=True))
    mapping.release()
    expected = (pattern(claim.pool_id, block_id, shape.place(block_id).num_bytes) for block_id in shape.proof_ids)
    if any(pool.read_block(block_id) != each for block_id, each in zip(shape.proof_ids, expected, strict=True)):
        raise ConfigError(
            f"what is mapped on {device} is not the pool of {client.path}: its proof blocks have other bytes; "
            "restart the memory server"
        )
    shared = SharedPool(client, claim)
    shared.await_blocks()
    return pool, shared


def check_model(kernels: KernelsSection, model: ModelConfig) -> None:
    """Raise ModelError for a model that a chosen kernel does not compute."""
    others = [heads.head_dim for heads in model.heads if heads.head_dim not in HEAD_DIMS]
    if others and (chosen := _chosen(kernels, *ATTENTION)):
        sizes = ", ".join(map(str, HEAD_DIMS))
        raise ModelError(f"head_dim = {others[0]}: kernels compute heads of {sizes}; {_remedy(chosen)}")
    for latent in model.latents:
        dims = (latent.rank, latent.nope_dim, latent.rope_dim, latent.value_dim)
        if not are_computed(*dims) and (chosen := _chosen(kernels, *ATTENTION)):
            raise ModelError(
                f"latent attention of {', '.join(map(str, dims))} dimensions: kernels compute powers of two from "
                f"{MIN_DIM} on; {_remedy(chosen)}"
            )
    vocab_size = model.vocab_size
    if vocab_size > MAX_VOCAB and (chosen := _chosen(kernels, "sampling")):
        raise ModelError(
            f"vocab_size = {vocab_size}: kernels sample from at most {MAX_VOCAB} tokens; {_remedy(chosen)}"
        )


def _chosen(kernels: KernelsSection, *families: str) -> list[str]:
    return [f"kernels.{family}" for family in families if getattr(kernels, family) == "triton"]


def _remedy(chosen: list[str]) -> str:
    return f'set {" and ".join(chosen)} to "torch", which is slow, or worker.device to "cpu"'
