"""The engine of a worker on a GPU that is not there, with the sizes that the worker would have, and without memory."""

from pathlib import Path
from typing import cast

import torch

from common.base.dtypes import DTYPES
from common.device.ahead.absent_gpu import META
from common.device.engine.engine import Engine, check_model, launches_early, make_ops
from common.device.engine.pool_budget import pool_shape
from common.device.engine.served_model import served_model
from common.kv.blocks import Allocator
from common.kv.pool import KVPool
from common.kv.transport import Transport
from common.memory.client.shared_pool import SharedPool
from common.models.decoder import Decoder
from common.models.loader import resolve_dtype, resolve_kv_dtype, resolve_max_len, with_cache_scales
from common.models.loading.weights import weights_layout
from common.ops.sampler import Sampler
from common.settings.config import Config
from common.wire.values.fingerprint import model_fingerprint
from common.wire.values.kv_layout import E4M3, KVLayout

GPU = torch.device("cuda", 0)
"""Device of which only properties are asked."""


def absent_engine(config: Config, *, step_tokens: int, logit_rows: int) -> Engine:
    """Return what `build_engine` would, on the GPU of `pretend`; nothing owns blocks, and nothing can be run."""
    model_dir = Path(config.model.path)
    model_config = served_model(config, GPU)
    check_model(config.kernels, model_config)
    dtype = resolve_dtype(config.model.dtype, model_config, GPU)
    max_len = resolve_max_len(config.model, model_config)
    kv_dtype = resolve_kv_dtype(config.kv.dtype, model_config, dtype, GPU)
    if kv_dtype == E4M3:
        model_config = with_cache_scales(model_config, model_dir)
    groups = model_config.cache_groups(config.kv.block_size, kv_dtype)
    fingerprint = model_fingerprint(model_dir)
    shape = pool_shape(config, model_config, KVLayout(fingerprint, groups), GPU, max_len)
    layout = weights_layout(model_config.stacks(), DTYPES[dtype])
    pool = KVPool(shape, torch.empty(shape.num_bytes, dtype=torch.uint8, device=META))
    ops, step_ops, graph_safe = make_ops(config, model_config, pool, META, logit_rows)
    pdl = launches_early(config, META)
    weights = torch.empty(layout.num_bytes, dtype=torch.uint8, device=META)
    return Engine(
        device=META,
        model=Decoder(model_config, layout.tensors(weights), max_len),
        model_fingerprint=fingerprint,
        ops=ops,
        step_ops=step_ops,
        pdl=pdl,
        sampler=Sampler(config.kernels.sampling, logit_rows, model_config.vocab_size, META, pdl=pdl),
        pool=pool,
        allocator=cast(Allocator, None),
        shared=cast(SharedPool, None),
        transport=cast(Transport, None),
        max_len=min(max_len, shape.most_tokens(step_tokens)),
        graph_safe=graph_safe,
    )
