"""Options of a device's memory server and of its pool of KV blocks."""

from dataclasses import dataclass

from common.settings.limits import DAY_S, MAX_STEP_TOKENS, SOCKET, WORKER_ID
from common.settings.options import option

MAX_POOL_BYTES = 1 << 44
KV_DTYPES = ("auto", "fp8")


@dataclass(frozen=True, slots=True)
class MemorySection:
    """The memory server of a device."""

    id: str = option("", "name in logs and at the router; memory, host name and process id when empty", form=WORKER_ID)
    socket: str = option(
        "auto",
        "path at which workers find it, in a directory of their user's own, or that directory/, where it has its name "
        "by device; auto is in /tmp/baton-UID, by device and router_endpoint",
        form=SOCKET,
    )
    device: str = option("cpu", "whose memory it owns", form=(r"cpu|cuda:\d{1,3}", "cpu or cuda:N"))
    gate_endpoint: str = option(
        "auto", "where workers of other hosts reach it, tcp://HOST:PORT; auto is a free port if net.advertise is set, "
        "and nowhere otherwise",
        form=(r"auto|tcp://[!-~]{1,180}", "auto or tcp://HOST:PORT"),
    )  # fmt: skip
    linger_s: float = option(
        0.0, "without a worker for so long it ends; 0: never, but one that a worker started: 60", within=(0.0, DAY_S)
    )
    decode_reserve: float = option(
        0.05,
        "share of a pool of KV blocks that prompts leave to sequences that are decoded, to grow into",
        within=(0.0, 0.5),
    )
    host_tier_bytes: int = option(
        0,
        "host memory for KV blocks that the pool has no room for, so that texts which begin with them need not compute "
        "them again; 0 follows host_tier_fraction; less than twice the pool adds little",
        within=(0, MAX_POOL_BYTES),
    )
    host_tier_fraction: float = option(
        0.0, "the same as a share of the host's memory, or of what a container may have", within=(0.0, 0.9)
    )
    poison_blocks: bool = option(
        False, "fill KV blocks that come free with NaN, so that reading what was not written shows; slow"
    )


@dataclass(frozen=True, slots=True)
class KVSection:
    """The pool of KV blocks, shared by the workers of a device."""

    block_size: int = option(16, "tokens a block", choices=(16, 32, 64))
    dtype: str = option(
        "auto",
        "numbers of keys and values: auto is model.dtype; fp8 is e4m3, so that a pool holds twice the tokens; all "
        "workers alike",
        choices=KV_DTYPES,
    )
    pool_bytes: int = option(
        0, "size of the pool, as the first of its workers has it; 0 follows memory_fraction", within=(0, MAX_POOL_BYTES)
    )
    memory_fraction: float = option(
        0.85, "share of a GPU's memory for the weights, the pool and the workers that share them", within=(0.01, 0.98)
    )
    prefix_cache: bool = option(True, "keep KV of texts that are over for others that begin alike, while there is room")
    take_replies: bool = option(
        True,
        "where replies are in another pool than prompts are computed in, take them from there if that is faster than "
        "computing them again; of use with prefix_cache only",
    )
    prefix_min_tokens: int = option(
        256, "shorter prompts are not looked up there: computing them takes hardly longer", within=(0, MAX_STEP_TOKENS)
    )
    prefill_sharers: int = option(
        1, "prefill workers that share a GPU's pool: whoever makes it leaves room for the steps of all", within=(0, 64)
    )
    decode_sharers: int = option(1, "decode workers that share it, standbys too", within=(0, 64))
    cpu_pool_bytes: int = option(
        268_435_456, "size of the pool on a CPU when pool_bytes is 0, likewise", within=(1 << 20, MAX_POOL_BYTES)
    )
    transport: str = option(
        "auto",
        "auto is cuda_ipc on a GPU, shm on a CPU, and nixl between hosts; nixl is nixl within a host, too, on each "
        "path of which either side has it; none hands nothing off",
        choices=("auto", "cuda_ipc", "shm", "nixl", "none"),
    )
    always_stage: bool = option(
        False, "blocks from other hosts pass through staging on a CPU, too, as they do on a GPU; for tests"
    )
    min_gb_per_s: float = option(
        0.05, "a path between hosts that moves fewer GB/s is refused, so that prompts are computed where they are "
        "decoded; not below the network's rate divided by 8",
        within=(0.0, 1000.0),
    )  # fmt: skip
