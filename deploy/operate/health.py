"""Reader of the router's GET /health: the workers, and the KV paths between workers."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from common.base.json_file import Json
from deploy.operate.healthcheck import SERVING

if TYPE_CHECKING:
    import aiohttp

POLL_DEADLINE_S = 2.0


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """A registered worker."""

    id: str
    role: str
    pid: int
    device: str
    transport: str
    is_standby: bool


@dataclass(frozen=True, slots=True)
class KVPath:
    """A tried KV path from a prefill worker to a decode worker; `error` is empty if the path works."""

    prefill_id: str
    decode_id: str
    transport: str
    gb_per_s: float | None  # None: nothing is copied
    error: str


@dataclass(frozen=True, slots=True)
class Health:
    """State of the system as known to the router."""

    status: str
    problems: tuple[str, ...]
    workers: tuple[WorkerHealth, ...]
    paths: tuple[KVPath, ...]

    @property
    def is_complete(self) -> bool:
        """True if requests are answered and every possible KV path has been tried."""
        able = [worker for worker in self.workers if worker.transport != "none"]
        prefills = [worker.id for worker in able if worker.role == "prefill"]
        decodes = [worker.id for worker in able if worker.role == "decode"]
        tried = {(path.prefill_id, path.decode_id) for path in self.paths}
        return self.status in SERVING and tried.issuperset(product(prefills, decodes))

    @property
    def transport(self) -> str:
        """KV transports in use with measured rates, in words."""
        rates: dict[str, list[float]] = {}
        for path in self.paths:
            if not path.error:
                rates.setdefault(path.transport, []).extend([] if path.gb_per_s is None else [path.gb_per_s])
        words = [f"{name} at {_span(values)} GB/s" if values else name for name, values in sorted(rates.items())]
        return ", ".join(words) or "none"


def parse_health(body: Mapping[str, Json]) -> Health:
    """Parse a body of GET /health; raises KeyError, TypeError or AttributeError for a body of another program."""
    return Health(
        status=body["status"],
        problems=tuple(body["problems"]),
        workers=tuple(
            WorkerHealth(each["id"], role, each["pid"], each["device"], each["transport"], each["standby"] is not None)
            for role, members in body["workers"].items()
            for each in members
        ),
        paths=tuple(
            KVPath(each["prefill"], each["decode"], each["transport"], each["gb_per_s"], each["error"])
            for each in body["kv_paths"]
        ),
    )


async def fetch_health(session: "aiohttp.ClientSession", url: str) -> Health | None:
    """Poll once; None without an answer, or with an answer of another program."""
    import aiohttp  # already done by who made the session

    try:
        timeout = aiohttp.ClientTimeout(total=POLL_DEADLINE_S)
        async with session.get(f"{url}/health", timeout=timeout) as response:
            return parse_health(await response.json())
    except (TimeoutError, aiohttp.ClientError, ValueError, KeyError, TypeError, AttributeError):
        return None


def local_url(host: str, port: int) -> str:
    """Return the URL at which a client on this machine reaches a server bound to `host`."""
    if host in ("", "0.0.0.0"):
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _span(rates: list[float]) -> str:
    low, high = min(rates), max(rates)
    return f"{low:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f}-{high:.1f}"
