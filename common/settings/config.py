"""All options of all programs; all programs read the same TOML file.

Only `options` reads the environment, and only for options defined here, so the options determine a program's behaviour.
Limits stand beside each option. A section checks the dependencies between its options when built.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from common.base.errors import ConfigError
from common.checkpoint.gguf.model_file import model_name
from common.settings.limits import DAY_S, MAX_STEP_TOKENS, MIN_STEP_TOKENS, SOCKET, WORKER_ID
from common.settings.memory_sections import KVSection, MemorySection
from common.settings.observation_sections import LogSection, TraceSection
from common.settings.options import option
from common.settings.slo_section import SloSection

DTYPES = ("auto", "bfloat16", "float16", "float32")
QUANTIZATIONS = ("auto", "packed", "plain", "fp8", "int8", "int4")
HEADS = ("keep", "fp8", "int8")
KERNELS = ("triton", "torch")
MODEL_NAME = (r".{0,200}", "at most 200 characters")
ORIGINS = (
    r"(\*|https?://[!-+\--~]{1,200}(,https?://[!-+\--~]{1,200}){0,99})?",
    "origins such as https://example.org, separated by commas without spaces, at most 100, or *",
)
ENDPOINT = (r"auto|(ipc|tcp)://[!-~]{1,180}", "auto, ipc://PATH or tcp://HOST:PORT")
HOST = (r"[!-.0-~]{0,180}", "a host name or an address")
DEVICE = (r"auto|cpu|cuda(:\d{1,3})?", "auto, cpu, cuda or cuda:N")
MAX_TOKENS = 1 << 24
"""Tokens of a sequence; longer than any model's context."""
GPU_STEP_TOKENS, CPU_STEP_TOKENS = 8192, 1024
GPU_CHUNK_TOKENS, CPU_CHUNK_TOKENS = 2048, 128
MAX_QUEUED_TOKENS = 1 << 40
MAX_PRIORITY = (1 << 31) - 1
LEAST_SILENCE_S = 0.1


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True)
class ModelSection:
    """The served model; router and workers must agree."""

    path: str = option("deploy/demo_model", "model directory in Hugging Face layout, or a GGUF file")
    name: str = option("", "name that clients use; that of the directory or file when empty", form=MODEL_NAME)
    dtype: str = option("auto", "of weights: auto is bfloat16 on a GPU, float32 on a CPU", choices=DTYPES)
    quantization: str = option(
        "auto",
        "auto: as the checkpoint has them where the device is as fast, else plain: matrices made for inputs of 8 bits, "
        "experts of 8 bits, and on a GPU codes of 4 bits in groups, whose prompts are slower; packed: all codes "
        "in groups; plain: none in codes; fp8, int8: in 8 bits, quantized row by row at load; int4: in 4 bits, in "
        "groups of 128",
        choices=QUANTIZATIONS,
    )
    head: str = option(
        "keep",
        "matrix of the logits; keep: as the model has it; fp8, int8: in 8 bits, quantized row by row at load, and a "
        "copy if the input's table is the same",
        choices=HEADS,
    )
    max_len: int = option(
        0, "longest prompt plus output, in tokens; 0 is the model's own limit", within=(0, MAX_TOKENS)
    )

    def __post_init__(self) -> None:
        _require(self.max_len != 1, "model.max_len = 1: a prompt and its output are 2 tokens at least; 0: the model's")

    @property
    def served_name(self) -> str:
        return self.name or model_name(Path(self.path))


@dataclass(frozen=True, slots=True)
class NetSection:
    """Connections between the processes."""

    router_endpoint: str = option(
        "auto", "where the router binds and the others dial: ipc://PATH in a directory of your own, or tcp://HOST:PORT "
        "with a secret; auto is a unix socket in /tmp/baton-UID, one router for each user",
        form=ENDPOINT,
    )  # fmt: skip
    handoff_endpoint: str = option(
        "auto",
        "where a decode worker binds for prefill workers: like router_endpoint, in tcp://HOST:* for a free port",
        form=ENDPOINT,
    )
    advertise: str = option(
        "", "name or address by which other hosts reach this one; with it, endpoints that are auto are in TCP, on free "
        "ports, and workers of other hosts may read KV blocks here",
        form=HOST,
    )  # fmt: skip
    ucx_transports: str = option(
        "auto", "what carries KV blocks between hosts, as in UCX_TLS and alike on all hosts: auto is rc where there "
        "are RDMA devices, else tcp",
        form=(r"[a-z0-9_,]{1,100}", "auto, or names such as tcp or rc, separated by commas"),
    )  # fmt: skip
    secret_file: str = option("", "file with a secret that all processes share, and nobody else; for tcp://")
    heartbeat_s: float = option(0.5, "seconds between signs of life", within=(0.01, 60.0))
    worker_timeout_s: float = option(3.0, "a peer silent for this long is taken for dead", within=(0.02, 3600.0))
    step_timeout_s: float = option(
        120.0, "a worker busy without a finished step for this long is taken for stuck", within=(0.1, DAY_S)
    )
    max_queued_messages: int = option(
        100_000, "messages a socket holds for a slow peer before it drops", within=(1000, 10_000_000)
    )

    def __post_init__(self) -> None:
        _require(
            self.worker_timeout_s >= 2 * self.heartbeat_s > 0,
            f"net.worker_timeout_s = {self.worker_timeout_s}: at least two heartbeats of net.heartbeat_s = "
            f"{self.heartbeat_s}; raise it, or lower that",
        )


@dataclass(frozen=True, slots=True)
class RouterSection:
    """The HTTP side."""

    host: str = option("127.0.0.1", "address that HTTP binds to")
    port: int = option(8000, "port that HTTP binds to; 0 picks a free one", within=(0, 65_535))
    take_over: str = option("", "auto: take over the port of this user's router; a path: serve that of a port holder")
    front_endpoint: str = option(
        "", "where this router binds for fronts, which make the texts of its completions, and where a front dials: as "
        "net.router_endpoint; without it there are no fronts",
        form=(rf"({ENDPOINT[0]})?", ENDPOINT[1]),
    )  # fmt: skip
    max_requests: int = option(
        2048, "completions in flight or queued; above it clients get 429 with Retry-After", within=(1, 1_000_000)
    )
    max_queued_tokens: int = option(16_777_216, "prompt tokens queued before 429", within=(1024, MAX_QUEUED_TOKENS))
    request_timeout_s: float = option(600.0, "a completion not finished after this long fails", within=(1.0, 7 * DAY_S))
    worker_wait_s: float = option(60.0, "without a worker pair requests wait this long, then 503", within=(0.0, DAY_S))
    max_attempts: int = option(
        4, "times in a row that one completion may fail without getting on before it is given up", within=(1, 100)
    )
    prefill_window: float = option(
        3.0,
        "prompt tokens sent ahead to a prefill worker, in multiples of its step budget: two steps are launched, and of "
        "what waits the third is chosen",
        within=(0.1, 1000.0),
    )
    drain_s: float = option(30.0, "on SIGTERM, seconds that running requests may take to finish", within=(0.0, DAY_S))
    max_body_bytes: int = option(16_777_216, "largest HTTP body", within=(1024, 1 << 30))
    max_bodies_bytes: int = option(
        33_554_432,
        "long HTTP bodies held at once, together; above it clients get 429 with Retry-After",
        within=(1024, 1 << 36),
    )
    max_unread_bytes: int = option(
        268_435_456,
        "bytes of answers that their clients have not read yet, together; one client may have a quarter of it; where "
        "it is more the largest answer is cut off",
        within=(1 << 20, 1 << 40),
    )
    kv_events: bool = option(
        True,
        "where there are several pools of KV blocks, choose by what their memory servers tell of the blocks in them; "
        "false: by what was sent where",
    )
    text_cache_bytes: int = option(
        16_777_216, "tokens of texts kept, so that these are not encoded again, by each process", within=(0, 1 << 36)
    )
    min_priority: int = option(
        0, "the most urgent `priority` that clients get, lower goes first", within=(-MAX_PRIORITY, 0)
    )
    api_key_file: str = option(
        "",
        "file with API keys, one a line: who shows none of them gets 401; read again when it changes; without a file "
        "everybody may ask",
    )
    cors_origins: str = option(
        "", "origins whose pages a browser lets call, separated by commas; * is any", form=ORIGINS
    )
    otlp_endpoint: str = option(
        "", "OpenTelemetry collector that gets a span of each request and its phases, over HTTP; needs the otel extra",
        form=(r"(https?://[!-~]{1,200})?", "a URL such as http://127.0.0.1:4318"),
    )  # fmt: skip
    stream_keepalive_s: float = option(
        0.0, "a stream silent for this long gets a comment, its first token or not; 0: never", within=(0.0, DAY_S)
    )
    body_timeout_s: float = option(60.0, "an HTTP body not complete after this long is refused", within=(0.1, DAY_S))
    max_header_bytes: int = option(
        32_768, "longest request line and headers of a request, together", within=(1024, 1 << 20)
    )
    header_timeout_s: float = option(
        20.0, "a connection whose first request's headers, or a next one's, take longer is closed", within=(0.1, DAY_S)
    )
    keepalive_s: float = option(75.0, "a connection idle for this long between requests is closed", within=(0.1, DAY_S))

    def __post_init__(self) -> None:
        _require(
            self.max_bodies_bytes >= self.max_body_bytes,
            f"router.max_bodies_bytes = {self.max_bodies_bytes}: at least router.max_body_bytes, {self.max_body_bytes}",
        )
        _require(
            not 0 < self.stream_keepalive_s < LEAST_SILENCE_S,
            f"router.stream_keepalive_s = {self.stream_keepalive_s:g}: 0 or at least {LEAST_SILENCE_S:g}",
        )


@dataclass(frozen=True, slots=True)
class WorkerSection:
    """Options of prefill and decode workers."""

    id: str = option("", "name in logs and routing; role, host name and process id when empty", form=WORKER_ID)
    device: str = option(
        "auto",
        "where it computes; auto takes the GPU with the fewest workers of its role, if there is one",
        form=DEVICE,
    )
    cuda_graphs: bool = option(True, "replay captured graphs instead of launching kernels one by one")
    batching: bool = option(True, "run several sequences in one step; false runs one at a time")
    drain_s: float = option(30.0, "on SIGTERM, seconds that owned requests may take to finish", within=(0.0, DAY_S))
    memory_socket: str = option(
        "auto",
        "socket of the device's memory server, which has the weights and the KV blocks, or a directory/ that has it by "
        "device; auto is in /tmp/baton-UID, by device and router_endpoint, where one is started if there is none",
        form=SOCKET,
    )
    standby: int = option(
        0,
        "it stands by for so many others of its role on its device: ready, and without requests while they are there; "
        "0: it is no standby",
        within=(0, 256),
    )
    num_threads: int = option(0, "CPU threads of the math library; 0 leaves its default", within=(0, 1024))


@dataclass(frozen=True, slots=True)
class PrefillSection:
    """The prefill worker's scheduler."""

    max_batch_tokens: int = option(
        0,
        f"prompt tokens computed in one step, at least {MIN_STEP_TOKENS}; 0 is {GPU_STEP_TOKENS} on a GPU, fewer where "
        f"memory is short, and {CPU_STEP_TOKENS} on a CPU, where larger steps would hold up other prompts for seconds",
        within=(0, MAX_STEP_TOKENS),
    )
    max_mixed_tokens: int = option(
        4096,
        "prompt tokens computed in a step in which short prompts overtake long ones: in smaller steps their first "
        "tokens come sooner",
        within=(MIN_STEP_TOKENS, MAX_STEP_TOKENS),
    )
    max_num_seqs: int = option(64, "prompts in one step", within=(1, 1024))
    chunking: bool = option(True, "split prompts longer than a step's budget; false computes every prompt in one piece")
    sm_share: int = option(
        100,
        "percent of the GPU's multiprocessors that prompts may use while something else is being served; "
        "100 is no limit",
        within=(1, 100),
    )

    def __post_init__(self) -> None:
        _require(
            self.max_batch_tokens == 0 or self.max_batch_tokens >= MIN_STEP_TOKENS,
            f"prefill.max_batch_tokens = {self.max_batch_tokens}: at least {MIN_STEP_TOKENS}, or 0 for what suits the "
            "device",
        )

    def on(self, device_type: str) -> "PrefillSection":
        """Return the section with a step budget; an unset budget becomes the device type's default."""
        default = CPU_STEP_TOKENS if device_type == "cpu" else GPU_STEP_TOKENS
        return replace(self, max_batch_tokens=self.max_batch_tokens or default)


@dataclass(frozen=True, slots=True)
class DecodeSection:
    """The decode worker's scheduler."""

    max_num_seqs: int = option(256, "rows of the batch: sequences decoded at once", within=(1, 1024))
    max_pulls: int = option(16, "handoffs being pulled at once", within=(1, 1024))
    local_chunk_tokens: int = option(
        0,
        f"prompt tokens a step when a prompt is computed here, without a prefill worker, at least {MIN_STEP_TOKENS}; "
        f"0 is {GPU_CHUNK_TOKENS} on a GPU, fewer where memory is short, and {CPU_CHUNK_TOKENS} on a CPU: streams wait "
        "for each",
        within=(0, MAX_STEP_TOKENS),
    )
    short_prompt_tokens: int = option(
        0,
        "a prompt of which no more tokens are to be computed may be computed here when prefill workers are busy for "
        "longer than that takes; at most local_chunk_tokens; 0: none",
        within=(0, MAX_STEP_TOKENS),
    )

    share_prefixes: bool = option(
        True,
        "read KV blocks that several sequences begin with, a system prompt's or a document's, once a step for all of "
        "them, on Hopper GPUs, where that saves enough",
    )

    def __post_init__(self) -> None:
        _require(
            self.local_chunk_tokens == 0 or self.local_chunk_tokens >= MIN_STEP_TOKENS,
            f"decode.local_chunk_tokens = {self.local_chunk_tokens}: at least {MIN_STEP_TOKENS}, or 0 for what suits "
            "the device",
        )

    def on(self, device_type: str) -> "DecodeSection":
        """Return the section with a chunk size; an unset size becomes the device type's default."""
        default = CPU_CHUNK_TOKENS if device_type == "cpu" else GPU_CHUNK_TOKENS
        return replace(self, local_chunk_tokens=self.local_chunk_tokens or default)


@dataclass(frozen=True, slots=True)
class KernelsSection:
    """Implementation of each operation on a GPU; torch is slow, for debugging and comparison."""

    norm: str = option("triton", "RMSNorm", choices=KERNELS)
    rope: str = option("triton", "query/key norm, RoPE and the write of K and V", choices=KERNELS)
    activation: str = option("triton", "activation(gate) * up", choices=KERNELS)
    prefill_attention: str = option("triton", "ragged paged attention of prompts", choices=KERNELS)
    decode_attention: str = option("triton", "split-KV paged attention of one token a sequence", choices=KERNELS)
    sampling: str = option("triton", "choice of the next token", choices=KERNELS)
    experts: str = option("triton", "choice of experts, and their products", choices=KERNELS)
    linear: str = option("triton", "products of few tokens with weights; torch is cuBLAS for all", choices=KERNELS)
    pdl: bool = option(
        True, "start kernels of a captured decode step before their predecessors have finished, on GPUs from 9.0 on"
    )
    compiled: str = option("", "file of compiled kernels, made by baton warm; what it lacks is compiled")


@dataclass(frozen=True, slots=True)
class Config:
    """All sections; each program has flags for the sections in its use."""

    model: ModelSection = field(default_factory=ModelSection)
    net: NetSection = field(default_factory=NetSection)
    router: RouterSection = field(default_factory=RouterSection)
    worker: WorkerSection = field(default_factory=WorkerSection)
    memory: MemorySection = field(default_factory=MemorySection)
    prefill: PrefillSection = field(default_factory=PrefillSection)
    decode: DecodeSection = field(default_factory=DecodeSection)
    kv: KVSection = field(default_factory=KVSection)
    slo: SloSection = field(default_factory=SloSection)
    kernels: KernelsSection = field(default_factory=KernelsSection)
    log: LogSection = field(default_factory=LogSection)
    trace: TraceSection = field(default_factory=TraceSection)


ROUTER_SECTIONS = ("model", "net", "router", "log")
WORKER_SECTIONS = ("model", "net", "worker", "prefill", "decode", "kv", "slo", "kernels", "log", "trace")
"""Sections of both roles, because each leaves room for the other's steps on a shared GPU."""
MEMORY_SECTIONS = ("memory", "net", "log")
